"""The capture format: manifest, journal, shards and digests; written, read and verified here (docs/capture-format.md)."""
