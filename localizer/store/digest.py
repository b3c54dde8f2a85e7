"""Digests of rows: the one place that knows the algorithms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from localizer.wire.rowsum import ROWSUM, digests

XXH3 = "xxh3-128"

ALGORITHMS = (XXH3, ROWSUM)
"""Names of the algorithms of row digests, all of 16 bytes."""

BY_SITE = "by-site"
"""What a digest shard says in place of an algorithm where not all of its sites have the usual one."""


def row_digest(algorithm: str, row: bytes | memoryview) -> bytes:
    """The digest of a row's elements in C order, each in its own dtype."""
    if algorithm == XXH3:
        return xxhash.xxh3_128_digest(row)
    if algorithm == ROWSUM:
        return digests(np.frombuffer(row, np.uint8)[None]).tobytes()
    raise ValueError(f"unknown row digest {algorithm!r}")


def row_digests(rows: Sequence[bytes | memoryview]) -> bytes:
    """The usual digests of rows, one after the other."""
    return b"".join(map(xxhash.xxh3_128_digest, rows))


def shard_algorithm(sites: Sequence[str]) -> str:
    """What a digest shard says of the algorithms of its sites."""
    return XXH3 if all(algorithm == XXH3 for algorithm in sites) else BY_SITE
