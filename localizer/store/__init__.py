"""The capture format (docs/capture-format.md): documents, shards and digests; written, read, verified."""
