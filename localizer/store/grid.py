"""Digests by row and site, as they come in."""

from __future__ import annotations

import numpy as np

from localizer.store.schema import DIGEST_BYTES

SPARE_SITES = 64
"""Room for so many sites more, and a quarter, where one comes that has none: modules come one by one."""

CELL = np.dtype((np.void, DIGEST_BYTES))


class Grid:
    """Digests of one shard; it grows with its rows and sites, and has room for more of both.

    Attributes:
        digest: [rows, sites] of 16 bytes, zero where nothing came in.
        present: [rows, sites], whether something did.
    """

    def __init__(self, rows: int) -> None:
        self.digest = np.zeros((rows, 0), CELL)
        self.present = np.zeros((rows, 0), np.bool_)

    def reach(self, rows: int, sites: int) -> None:
        """Have at least so many rows and sites."""
        had = self.present.shape
        if rows <= had[0] and sites <= had[1]:
            return
        want = (
            had[0] if rows <= had[0] else max(rows, 2 * had[0]),
            had[1] if sites <= had[1] else max(sites, had[1] + had[1] // 4 + SPARE_SITES),
        )
        digest, present = np.zeros(want, CELL), np.zeros(want, np.bool_)
        digest[: had[0], : had[1]], present[: had[0], : had[1]] = self.digest, self.present
        self.digest, self.present = digest, present

    def put(self, rows: np.ndarray, sites: np.ndarray | int, digests: bytes) -> None:
        """Set the digests, one after the other, of places that are different from each other."""
        self.digest[rows, sites] = np.frombuffer(digests, CELL)
        self.present[rows, sites] = True

    def move(self, site: int, before: np.ndarray, after: np.ndarray) -> None:
        """Give digests of a site other rows."""
        digest, present = self.digest[before, site], self.present[before, site]
        self.digest[before, site], self.present[before, site] = np.zeros((), CELL), False
        self.digest[after, site], self.present[after, site] = digest, present

    def tensors(self, rows: int, order: list[int]) -> dict[str, np.ndarray]:
        """The first rows with sites in this order, as the capture format has them."""
        columns = np.array(order, np.int64)
        digest: np.ndarray = np.take(self.digest[:rows], columns, 1)
        return {
            "digest": digest.view(np.uint8).reshape(rows, len(order), DIGEST_BYTES),
            "present": np.packbits(self.present[:rows, columns], axis=1, bitorder="little"),
        }
