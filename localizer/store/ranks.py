"""The rows of several workers as one table: they computed the same rows, each its own sites of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from localizer.errors import DamagedCapture
from localizer.store.schema import DIGEST_BYTES, Site
from localizer.store.sets import RowSet, Stacked, Windowed, stack
from localizer.wire import ranks

SAME = ("request", "position", "token", "occurrence", "step", "kind", "prefix")
"""Columns in which the row tables of all ranks are equal."""

Columns = dict[str, np.ndarray]
"""The columns of a row table by name, each [rows], and `prefix`, [rows, 16]."""

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
    digest = Joined(
        [(part, both[0]) for part, both in stacks], (rows, sites, DIGEST_BYTES), np.dtype(np.uint8)
    )
    present = Joined([(part, both[1]) for part, both in stacks], (rows, sites), np.dtype(np.bool_))
    return digest, present


def columns(
    shards: Mapping[int, tuple[Path, Sequence[Site]]], table: Mapping[str, int]
) -> dict[int, tuple[np.ndarray, dict[str, int]]]:
    """For each rank the columns of its sites in the table of the capture, and their order by name.

    Args:
        shards: of each rank a digest shard, and the sites that it names.
        table: the column of each site of the capture.

    Raises:
        DamagedCapture: a site is of two ranks, or not of the capture.
    """
    found: dict[int, tuple[np.ndarray, dict[str, int]]] = {}
    owners: dict[str, int] = {}
    for rank, (path, sites) in shards.items():
        for site in sites:
            if owners.setdefault(site.name, rank) != rank or site.name not in table:
                raise DamagedCapture(
                    f"{path} is damaged: it holds the site {site.name[:80]!r}, which is another rank's "
                    "or which the manifest does not name."
                )
        names = sorted((site.name for site in sites), key=table.__getitem__)
        order = {name: number for number, name in enumerate(names)}
        found[rank] = np.array([table[name] for name in names], np.int64), order
    return found


def joined(
    sets: Mapping[int, Sequence[RowSet]], read: Callable[[Sequence[RowSet]], Columns]
) -> tuple[Columns, list[RankRows]]:
    """The row table of the rank that has most rows, of several the lowest; and what each rank has of it.

    Args:
        sets: of each rank that has any.
        read: gives the columns of some sets.
    """
    totals = {rank: sum(part.count for part in mine) for rank, mine in sets.items()}
    longest = max(totals, key=lambda rank: (totals[rank], -rank), default=0)
    table = read(sets.get(longest, []))
    found = []
    for rank, mine in sets.items():
        rows = 0
        for part in mine:
            same = part.count if rank == longest else _equal_rows(table, read([part]), part.start)
            rows += same
            if same < part.count:
                break
        which = mine[0].columns
        assert isinstance(which, np.ndarray)
        found.append(RankRows(rank, mine, which, rows))
    return table, found


def _equal_rows(table: Columns, part: Columns, start: int) -> int:
    """How many of the first rows of a part of a rank are the rows of the table from `start` on."""
    count = len(part["position"])
    same = np.ones(count, np.bool_)
    for name in SAME:
        equal = table[name][start : start + count] == part[name]
        same &= equal.all(axis=1) if equal.ndim == 2 else equal
    return count if same.all() else int(np.argmin(same))


def absent(missing: Sequence[int]) -> list[str]:
    """That ranks left nothing, in sentences."""
    return [f"rank {rank} is missing" for rank in missing]


def short(table: Columns, parts: Sequence[RankRows], missing: Sequence[int]) -> list[str]:
    """Which ranks lack rows of a table, in sentences; `missing` are those that left none."""
    total = len(table["position"])
    found = absent(missing) if total else []
    for part in parts:
        if part.rows < sum(item.count for item in part.sets):
            step = int(table["step"][part.rows])
            found.append(f"rank {part.rank} has other rows than the others from step {step} on")
        elif part.rows < total:
            found.append(f"rank {part.rank} has {part.rows:,} of {total:,} rows")
    return found


def side_by_side(sites: Sequence[Sequence[tuple[str, T]]]) -> list[T]:
    """The sites of all ranks in execution order, those that are the same on a single worker together.

    Args:
        sites: for each rank the names of its sites in execution order, each with what stands for it.
    """
    if len(sites) == 1:
        return [what for _, what in sites[0]]
    behind: dict[str | None, str | None] = {None: None}  # what follows each name; None is both ends
    there: dict[str, list[T]] = {}
    for mine in sites:
        last: str | None = None
        for name, what in mine:
            base = ranks.base(name)
            if base not in there:
                behind[base], behind[last] = behind[last], base
                there[base] = []
            last = base
            there[base].append(what)
    order: list[T] = []
    following = behind[None]
    while following is not None:
        order += there[following]
        following = behind[following]
    return order
