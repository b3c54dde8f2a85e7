"""One module per command, thin: parse, call, print."""
