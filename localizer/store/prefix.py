"""Prefixes: what identifies the computation that a row asks for, whatever batch or chunk it came from."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import xxhash

DRAFT_SALT = b"draft"


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as they are hashed: little-endian unsigned 64-bit."""
    return struct.pack(f"<{len(tokens)}Q", *tokens)


def prefix_digest(tokens: Sequence[int], salt: bytes = b"") -> bytes:
    """xxh3-128 (16 bytes, canonical) of `salt` followed by the token ids."""
    return xxhash.xxh3_128_digest(salt + token_bytes(tokens))


def prefix_digests(tokens: Sequence[int]) -> bytes:
    """The prefixes of all positions of a text, 16 bytes each."""
    digest, found = xxhash.xxh3_128(), bytearray()
    for token in tokens:
        digest.update(token_bytes([token]))
        found += digest.digest()
    return bytes(found)


def draft_salt(draft_step: int, base: int) -> bytes:
    """Salt of the prefixes of draft rows: the draft step, from 1, and the proposal's base position."""
    return DRAFT_SALT + token_bytes([draft_step, base])


class RequestPrefixes:
    """Follows one request through its steps and gives prefix and occurrence of each of its rows.

    It grows with the request, by one entry a row computed, and is forgotten with the request's round. Tokens
    come from the rows themselves (the input ids that the forward used); only tokens that no row
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
        return prefix, self._occurrence(position, prefix)

    def draft_rows(
        self, draft_step: int, base: int, first: int, shift: int, inputs: Sequence[int], since: int = 0
    ) -> Iterator[tuple[bytes, int] | None]:
        """(prefix, occurrence) of draft rows, each after those before it; None if earlier tokens are unknown.

        Args:
            draft_step: from 1.
            base: position from which the proposal starts.
            first: position of the first of `inputs`.
            shift: by how many places the draft's inputs run ahead of the target's: 1 for EAGLE, else 0.
            inputs: the draft's own input ids from position `first` on.
            since: how many of the inputs belong to rows of earlier draft steps.
        """
        known = self._tokens[: first + shift]
        if len(known) < first + shift or min(inputs, default=0) < 0:
            yield from [None] * (len(inputs) - since)
            return
        digest = xxhash.xxh3_128(draft_salt(draft_step, base) + self._salt + token_bytes(known))
        for index, token in enumerate(inputs):
            digest.update(token_bytes([token]))
            if index >= since:
                prefix = digest.digest()
                yield prefix, self._occurrence(first + index, prefix)

    def _occurrence(self, position: int, prefix: bytes) -> int:
        """How often the row was computed before."""
        computed = self._seen.setdefault(position, {})
        computed[prefix] = computed.get(prefix, -1) + 1
        return computed[prefix]
