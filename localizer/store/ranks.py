"""The rows of several workers as one table: they computed the same rows, each its own sites of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from localizer.store.sets import RowSet, Stacked, Windowed, stack
from localizer.wire import ranks

SAME = ("request", "position", "token", "occurrence", "step", "kind", "prefix")
"""Columns in which the row tables of all ranks are equal."""

T = TypeVar("T")


@dataclass(frozen=True)
class RankRows:
    """What one rank recorded.

    Attributes:
        rank: its number.
        sets: its sets of shards.
        columns: int64, the columns of its sites in the table of the capture.
        rows: so many of its first rows are those of the table; others do not count.
    """

    rank: int
    sets: Sequence[RowSet]
    columns: np.ndarray
    rows: int


class Joined(Windowed):
    """An array over all rows and sites of a capture, whose columns lie in the files of several ranks."""

    def __init__(
        self,
        parts: Sequence[tuple[RankRows, Stacked]],
        shape: tuple[int, ...],
        dtype: np.dtype,
    ) -> None:
        self._parts, self.shape, self.dtype = parts, shape, dtype

    def _run(self, start: int, stop: int) -> np.ndarray:
        found = np.zeros((max(0, stop - start), *self.shape[1:]), self.dtype)
        for rank, array in self._parts:
            end = min(stop, rank.rows)
            if start < end:
                found[: end - start, rank.columns] = array[start:end]
        return found

    def _pick(self, rows: np.ndarray) -> np.ndarray:
        found = np.zeros((len(rows), *self.shape[1:]), self.dtype)
        for rank, array in self._parts:
            mine = np.flatnonzero(rows < rank.rows)
            if len(mine):
                found[np.ix_(mine, rank.columns)] = array[rows[mine]]
        return found


def join(parts: Sequence[RankRows], rows: int, sites: int) -> tuple[Stacked, Stacked]:
    """Digests and presence over all ranks of a capture, whose table has `rows` rows."""
    stacks = [(part, stack(part.sets, len(part.columns))) for part in parts]
    found = []
    for number, (last, dtype) in enumerate((((16,), np.uint8), ((), np.bool_))):
        arrays = [(part, both[number]) for part, both in stacks]
        found.append(Joined(arrays, (rows, sites, *last), np.dtype(dtype)))
    return found[0], found[1]


def equal_rows(table: dict[str, np.ndarray], part: dict[str, np.ndarray], start: int) -> int:
    """How many of the first rows of a part of a rank are the rows of the table from `start` on.

    Both have their columns by name, the prefixes among them.
    """
    count = len(part["position"])
    same = np.ones(count, np.bool_)
    for name in SAME:
        equal = table[name][start : start + count] == part[name]
        same &= equal.all(axis=1) if equal.ndim == 2 else equal
    return count if same.all() else int(np.argmin(same))


def side_by_side(sites: Sequence[Sequence[tuple[str, T]]]) -> list[T]:
    """The sites of all ranks in execution order, those that are the same on a single worker together.

    Args:
        sites: for each rank the names of its sites in execution order, each with what stands for it.
    """
    if len(sites) == 1:
        return [what for _, what in sites[0]]
    order: list[str] = []
    there: dict[str, list[T]] = {}
    for mine in sites:
        at = 0  # where the next one is looked for, or put
        for name, what in mine:
            base = ranks.base(name)
            if base not in there:
                order.insert(at, base)
                there[base] = []
            at = 1 + (at if order[at : at + 1] == [base] else order.index(base))
            there[base].append(what)
    return [what for base in order for what in there[base]]
