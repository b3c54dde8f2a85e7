"""Prefixes: what identifies the computation that a row asks for, whatever batch or chunk it came from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as they are hashed: little-endian unsigned 64-bit."""
    return np.asarray(tokens, dtype="<u8").tobytes()


def prefix_digest(tokens: Sequence[int], salt: bytes = b"") -> bytes:
    """xxh3-128 (16 bytes, canonical) of `salt` followed by the token ids."""
    return xxhash.xxh3_128_digest(salt + token_bytes(tokens))


class RequestPrefixes:
    """Follows one request through its steps and gives prefix and occurrence of each of its rows.

    Tokens come from the rows themselves (the input ids that the forward used); only tokens that no row
    carries, those of cached positions, come from the prompt.
    """

    def __init__(self, prompt: Sequence[int], salt: bytes = b"") -> None:
        self.prompt = list(prompt)
        self._tokens = list(prompt)
        self._salt = salt
        self._hash = xxhash.xxh3_128(salt)
        self._length = 0
        self._seen: dict[int, dict[bytes, int]] = {}

    @property
    def started(self) -> bool:
        """Whether a row of the request was seen already."""
        return bool(self._seen)

    def row(self, position: int, token: int) -> tuple[bytes, int] | None:
        """(prefix, occurrence) of the row of `token` at `position`; None if earlier tokens are unknown."""
        if position > len(self._tokens) or token < 0:
            return None
        if position != self._length:
            self._hash = xxhash.xxh3_128(self._salt + token_bytes(self._tokens[:position]))
        self._tokens[position : position + 1] = [token]
        self._hash.update(token_bytes([token]))
        self._length = position + 1
        prefix = self._hash.digest()
        computed = self._seen.setdefault(position, {})
        occurrence = computed.get(prefix, 0)
        computed[prefix] = occurrence + 1
        return prefix, occurrence
