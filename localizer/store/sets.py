"""Sets of shards: the rows of a capture as they lie on disk, mapped only while they are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from localizer.errors import DamagedCapture
from localizer.store.schema import DIGEST_BYTES, ROW_INDEX, Site
from localizer.store.tensors import Header, TensorFile

WINDOW_ROWS = 4096
"""Rows that are read at a time where all are looked at, of an array that has no sets of its own."""


@dataclass(frozen=True)
class RowSet:
    """Rows that one rank computed one after the other: a row table, their digests, and what was kept of them.

    Attributes:
        rows, digests, payload: paths of the shards; `payload` is None where nothing was kept.
        start, count: the set's first row in the table of the capture, and its number of rows.
        sites: in the order of the digest shard.
        order: int64 [sites], for each site of the capture its place in `sites`; None where that is the same.
        open: gives the file at a path; a capture has too many of them to keep what they say of themselves.
        rank: who computed them; of several each has only some sites of the capture, and `order` is of those.
        columns: which sites of the capture these are, as an index; all where there is one rank.
    """

    rows: Path
    digests: Path
    payload: Path | None
    start: int
    count: int
    sites: tuple[Site, ...]
    order: np.ndarray | None
    open: Callable[[Path], TensorFile]
    rank: int = 0
    columns: np.ndarray | slice = field(default_factory=lambda: slice(None))

    @property
    def ordered(self) -> Sequence[Site]:
        """The sites in the order of the capture."""
        return self.sites if self.order is None else [self.sites[index] for index in self.order]

    def digest(self, start: int, stop: int) -> np.ndarray:
        """uint8 [stop - start, sites, 16]: digests of rows of this set, sites as in the capture."""
        return self._ordered(self.open(self.digests).array("digest", start, stop))

    def present(self, start: int, stop: int) -> np.ndarray:
        """Bool [stop - start, sites]: where rows of this set were recorded, sites as in the capture."""
        packed = self.open(self.digests).array("present", start, stop)
        bits = np.unpackbits(packed, axis=1, count=len(self.sites), bitorder="little")
        return self._ordered(bits.view(np.bool_))

    def _ordered(self, array: np.ndarray) -> np.ndarray:
        return array if self.order is None else array[:, self.order]

    def kept(self) -> Mapping[str, int]:
        """The number of rows kept of each site of which any are.

        Raises:
            DamagedCapture: the payload shard holds something else.
        """
        if self.payload is None:
            return {}
        try:
            return _kept(self.open(self.payload).header, self.sites)
        except ValueError as error:
            raise self._damaged(str(error)) from None

    def keeps(self, site: str) -> bool:
        """Whether rows of a site were kept."""
        return self.payload is not None and site in self.open(self.payload)

    def kept_rows(self, site: str) -> np.ndarray:
        """int64 [kept], ascending: which rows of this set were kept of a site, counted within the set."""
        assert self.payload is not None
        return self.open(self.payload).array(site + ROW_INDEX)

    def check_kept_rows(self, site: str) -> None:
        """Check that the kept rows of a site are rows of this set.

        Raises:
            DamagedCapture: they are not, or they do not ascend.
        """
        rows = self.kept_rows(site)
        if len(rows) and not (rows[0] >= 0 and rows[-1] < self.count and np.all(rows[1:] > rows[:-1])):
            raise self._damaged(f"{site[:80]!r} names rows that do not exist, or not in their order")

    def row(self, site: str, row: int) -> np.ndarray | None:
        """What was kept of row `row` of this set at a site, mapped; None if nothing was."""
        rows = self.kept_rows(site)
        at = int(np.searchsorted(rows, row))
        if at == len(rows) or rows[at] != row:
            return None
        assert self.payload is not None
        return self.open(self.payload).array(site, at, at + 1)[0]

    def _damaged(self, what: str) -> DamagedCapture:
        return DamagedCapture(f"{self.payload} is damaged: {what}; fetch or make the capture again.")


@lru_cache(maxsize=8)
def _kept(header: Header, sites: tuple[Site, ...]) -> Mapping[str, int]:
    """The number of rows that a payload shard keeps of each site.

    Raises:
        ValueError: it holds something else.
    """
    layouts = {site.name: (site.dtype, site.shape) for site in sites}
    found = {}
    for name, (dtype, shape, *_) in header.entries.items():
        if name.endswith(ROW_INDEX):
            continue
        indices = header.entries.get(name + ROW_INDEX)
        if layouts.get(name) != (dtype, shape[1:]) or indices is None or not shape:
            raise ValueError(f"{name[:80]!r} is not the payload of a site")
        if indices[:2] != ("int64", shape[:1]):
            raise ValueError(f"{name[:80]!r} has no index of int64 and shape {list(shape[:1])}")
        found[name] = shape[0]
    return found


class Stacked:
    """An array over all rows of a capture whose rows lie in its sets; nothing of it is held in memory.

    `stacked[rows]` is a numpy array; `rows` is a row, a slice, or an array of rows in any order or of bool.
    Rows that are neighbours in one set are a read-only view of the file, others a copy. Behind a row or a
    slice further indices may follow, as in `stacked[:, column]`.

    Args:
        sets: the sets, by their first row.
        read: gives the rows [start, stop) of a set.
        shape, dtype: of the whole.
    """

    def __init__(
        self,
        sets: Sequence[RowSet],
        read: Callable[[RowSet, int, int], np.ndarray],
        shape: tuple[int, ...],
        dtype: type[np.generic],
    ) -> None:
        self._sets, self._read = sets, read
        self._starts = np.array([part.start for part in sets], np.int64)
        self.shape, self.dtype = shape, np.dtype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: object) -> np.ndarray:
        rows, *rest = key if isinstance(key, tuple) else (key,)
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            found = self._run(start, stop)[::step] if step > 0 else self._pick(np.arange(start, stop, step))
            return found[(slice(None), *rest)]
        if isinstance(rows, (int, np.integer)):
            if not -len(self) <= rows < len(self):
                raise IndexError(f"there is no row {rows}")
            row = int(rows) % len(self)
            found = self._run(row, row + 1)[0]
            return found[tuple(rest)]
        if rest:
            raise TypeError("behind an array of rows there is no further index")
        chosen = np.asarray(rows)
        chosen = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen.astype(np.int64)
        count = len(chosen)
        if count and chosen[-1] - chosen[0] == count - 1 and np.all(chosen[1:] > chosen[:-1]):
            return self._run(int(chosen[0]), int(chosen[-1]) + 1)  # neighbours
        return self._pick(chosen)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._run(0, len(self)), dtype=dtype)  # type: ignore[call-overload]

    def blocks(self) -> Iterator[np.ndarray]:
        """The rows of one set after the other."""
        return (self._read(part, 0, part.count) for part in self._sets)

    def _run(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop)."""
        parts = []
        while start < stop:
            part = self._sets[int(np.searchsorted(self._starts, start, side="right")) - 1]
            end = min(stop, part.start + part.count)
            parts.append(self._read(part, start - part.start, end - part.start))
            start = end
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros((0, *self.shape[1:]), self.dtype)

    def _pick(self, rows: np.ndarray) -> np.ndarray:
        """Rows in any order."""
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        owners = np.searchsorted(self._starts, rows, side="right") - 1
        for owner in np.unique(owners):
            part, mine = self._sets[owner], owners == owner
            within = rows[mine] - part.start
            low = int(within.min())
            found[mine] = self._read(part, low, int(within.max()) + 1)[within - low]
        return found


class Windowed(Stacked):
    """An array that is made of others: `_run` and `_pick` give its rows."""

    def blocks(self) -> Iterator[np.ndarray]:
        """The rows, some thousand at a time."""
        starts = range(0, len(self), WINDOW_ROWS)
        return (self._run(start, min(start + WINDOW_ROWS, len(self))) for start in starts)


@dataclass(frozen=True)
class Table:
    """All rows of a capture, in the order they were computed.

    Attributes:
        columns: the integer columns of `localizer.store.steps.COLUMNS`, each [rows].
        prefix: uint8 [rows, 16].
        digest: uint8 [rows, sites, 16], read where it is indexed; zero where `present` is False.
        present: bool [rows, sites], the same.
    """

    columns: Mapping[str, np.ndarray]
    prefix: np.ndarray
    digest: Stacked
    present: Stacked

    def __len__(self) -> int:
        return len(self.prefix)

    def recorded(self) -> np.ndarray:
        """int64 [sites]: how many rows were recorded at each site."""
        none = np.zeros(self.present.shape[1], np.int64)
        return sum((block.sum(axis=0) for block in self.present.blocks()), start=none)


def stack(sets: Sequence[RowSet], sites: int) -> tuple[Stacked, Stacked]:
    """Digests and presence over all sets of a capture."""
    rows = sum(part.count for part in sets)
    digest = Stacked(sets, RowSet.digest, (rows, sites, DIGEST_BYTES), np.uint8)
    return digest, Stacked(sets, RowSet.present, (rows, sites), np.bool_)
