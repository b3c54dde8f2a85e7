"""Fuzzing of the readers: docs/fuzzing.md."""
