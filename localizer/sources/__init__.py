"""What to run: an interpreter with a vLLM, optionally with a checkout laid over it."""
