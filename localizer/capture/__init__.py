"""The parent process of a capture: launches the source and the writer, watches them, finalises the capture."""
