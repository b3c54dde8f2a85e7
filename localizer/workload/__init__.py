"""What to feed: the batch matrix, the prompts, and the built-in tiny model."""
