"""GitHub's REST API: the one part of localizer that talks to the network."""
