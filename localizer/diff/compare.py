"""Digest against digest for every paired row and shared site."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localizer.diff.align import Alignment
from localizer.store import scratch
from localizer.store.expected import applicable
from localizer.store.reader import Capture
from localizer.store.sets import Stacked

_LOWEST = np.array([(value & -value).bit_length() - 1 for value in range(256)], np.int64)
"""The lowest bit that is set, by the value of a byte."""

CHUNK_BYTES = 8 << 20
"""Digests compared at a time."""


class Bits:
    """A matrix of bool [rows, columns], all False at first, that takes a bit an entry.

    `bits[rows]` is bool [n, columns], for a row bool [columns]; `bits[rows, column]` is bool [n], where
    `rows` may be a slice too.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.shape = rows, columns
        self._packed = scratch.zeros((rows, (columns + 7) // 8), np.uint8)

    def put(self, start: int, block: np.ndarray) -> None:
        """Set the rows from `start` on to those of a bool array [n, columns]."""
        self._packed[start : start + len(block)] = np.packbits(block, axis=1, bitorder="little")

    def __getitem__(self, key: int | slice | np.ndarray | tuple[int | slice | np.ndarray, int]) -> np.ndarray:
        if isinstance(key, tuple):
            rows, column = key
            found: np.ndarray = self._packed[rows, column >> 3] >> np.uint8(column & 7) & np.uint8(1)
            return found.astype(np.bool_)
        packed = self._packed[key]
        bits = np.unpackbits(packed, axis=-1, count=self.shape[1], bitorder="little")
        return bits.view(np.bool_)

    def any(self) -> np.ndarray:
        """Bool [rows]: whether any column is set."""
        return np.asarray(self._packed.any(axis=1))

    def first(self, rows: np.ndarray) -> np.ndarray:
        """int64 [n]: the first column that is set, of rows in which one is."""
        if not len(rows):
            return np.zeros(0, np.int64)
        byte = (self._packed[rows] != 0).argmax(axis=1)
        value = self._packed[rows, byte].astype(np.int64)
        return 8 * byte + _LOWEST[value]


@dataclass(frozen=True)
class Comparison:
    """What the digests say.

    Attributes:
        compared: [pairs, sites], both sides hold the row.
        differ: [pairs, sites], compared, and of other bytes, dtype or shape.
        compared_rows, differ_rows: int64 [sites], how many pairs these are.
        missing_candidate, missing_parent: int64 [sites], pairs whose row should be there and is not.
    """

    compared: Bits
    differ: Bits
    compared_rows: np.ndarray
    differ_rows: np.ndarray
    missing_candidate: np.ndarray
    missing_parent: np.ndarray

    @classmethod
    def nothing(cls, alignment: Alignment) -> Comparison:
        """That of what is not comparable, and of what is still to be compared."""
        shape = len(alignment), len(alignment.sites)
        return cls(Bits(*shape), Bits(*shape), *(np.zeros(shape[1], np.int64) for _ in range(4)))


def compare(candidate: Capture, parent: Capture, alignment: Alignment) -> Comparison:
    """Compare the digests of all pairs, some at a time: in memory there are only the bits that result."""
    result = Comparison.nothing(alignment)
    sites = len(alignment.sites)
    layout = same_layout(candidate, parent, alignment)
    ours = _Side(candidate, alignment.candidate, alignment.candidate_sites)
    theirs = _Side(parent, alignment.parent, alignment.parent_sites)
    step = max(1, CHUNK_BYTES // max(1, 32 * sites))
    for start in range(0, len(alignment), step):
        part = slice(start, start + step)
        present, other = ours.present(part), theirs.present(part)
        compared = present & other
        differ = compared & ~(ours.equals(theirs, part) & layout)
        result.compared.put(start, compared)
        result.differ.put(start, differ)
        result.compared_rows[:] += compared.sum(axis=0)
        result.differ_rows[:] += differ.sum(axis=0)
        result.missing_candidate[:] += ours.missing(part, present)
        result.missing_parent[:] += theirs.missing(part, other)
    return result


def same_layout(candidate: Capture, parent: Capture, alignment: Alignment) -> np.ndarray:
    """Bool [sites]: whether a site's rows have the same dtype and shape on both sides."""
    ours, theirs = candidate.sites, parent.sites
    columns = zip(alignment.candidate_sites, alignment.parent_sites, strict=True)
    return np.array(
        [(ours[i].dtype, ours[i].shape) == (theirs[j].dtype, theirs[j].shape) for i, j in columns], np.bool_
    )


class _Side:
    """The paired rows of one capture at the shared sites; `part` is a slice of the pairs."""

    def __init__(self, capture: Capture, rows: np.ndarray, columns: np.ndarray) -> None:
        self._table, self._rows, self._columns = capture.table, rows, columns
        self._is_run = len(columns) > 0 and bool(np.all(np.diff(columns) == 1))
        skipped = capture.manifest.not_applicable if capture.manifest is not None else {}
        self._expected: dict[str, list[int]] = {}
        for index, column in enumerate(columns):
            site = capture.sites[column]
            if site.name not in skipped:
                self._expected.setdefault(site.rows, []).append(index)

    def present(self, part: slice) -> np.ndarray:
        """Bool [n, sites]: where the rows were recorded."""
        return self._shared(self._table.present, part)

    def equals(self, other: _Side, part: slice) -> np.ndarray:
        """Bool [n, sites]: where both have the same digest."""
        ours, theirs = (side._shared(side._table.digest, part).view(np.uint64) for side in (self, other))
        equal: np.ndarray = ours[..., 0] == theirs[..., 0]
        equal &= ours[..., 1] == theirs[..., 1]
        return equal

    def missing(self, part: slice, present: np.ndarray) -> np.ndarray:
        """int64 [sites]: rows that should be there and are not."""
        missing = np.zeros(present.shape[1], np.int64)
        columns = {name: self._table.columns[name][self._rows[part]] for name in ("kind", "logits")}
        for which, sites in self._expected.items():
            wanted = applicable(columns, which)
            missing[sites] = wanted.sum() - present[wanted][:, sites].sum(axis=0)
        return missing

    def _shared(self, array: Stacked, part: slice) -> np.ndarray:
        picked = array[self._rows[part]]
        if self._is_run:
            return picked[:, self._columns[0] : self._columns[-1] + 1]
        return picked[:, self._columns]
