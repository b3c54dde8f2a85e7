"""The parent process of a capture: launches source and writer, watches them, finalises the capture."""
