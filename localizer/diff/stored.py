"""Stored rows against stored rows, byte for byte: digests are not trusted but held against what was found."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from localizer.diff.align import Alignment
from localizer.diff.compare import Comparison, same_layout
from localizer.diff.result import StoredCoverage
from localizer.errors import DamagedCapture
from localizer.store.reader import Capture
from localizer.store.schema import ROW_INDEX
from localizer.store.sets import RowSet

BLOCK_BYTES = 4 << 20
"""Most bytes of a block, of which single rows are looked at where it differs; a single row may be longer."""

TASK_BYTES = 16 << 20
"""Bytes that a thread is given at a time: few tasks, since each has to wait for the interpreter's lock."""

MOST_THREADS = 8
"""More of them wait for memory."""

_memcmp = ctypes.CDLL(None).memcmp  # without the interpreter's lock
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class Sets:
    """Two sets of which rows pair.

    Attributes:
        pairs: int64 [n], indices into the alignment, of those rows.
        differ, compared: bool [n, sites], what the digests say of them.
        quiet: for each site whether the digests say that all n were recorded and none differs.
        files: the two payload files, each uint8, mapped.
    """

    pairs: np.ndarray
    differ: np.ndarray
    compared: np.ndarray
    quiet: list[bool]
    files: tuple[np.ndarray, np.ndarray]


class Block(NamedTuple):
    """Pairs of rows of one site that are neighbours in both files.

    Attributes:
        sets: where they are from.
        site: index into the shared sites.
        rows: int64 [n], indices into `sets.pairs`.
        size: bytes of one side.
        at: where the rows begin in the candidate's file.
        other_at: the same in the parent's.
    """

    sets: Sets
    site: int
    rows: np.ndarray
    size: int
    at: int
    other_at: int

    def expected(self) -> np.ndarray:
        """Bool [n]: which rows differ as the digests say."""
        found: np.ndarray = self.sets.differ[self.rows, self.site]
        return found

    def recorded(self) -> bool:
        """Whether both captures have digests of all rows."""
        return bool(self.sets.compared[self.rows, self.site].all())


def compare_stored(
    candidate: Capture, parent: Capture, alignment: Alignment, comparison: Comparison
) -> StoredCoverage:
    """Compare every pair of rows that both captures kept, in several threads.

    Raises:
        DamagedCapture: bytes and digests do not say the same.
    """
    pairs = differ = size = 0
    for block, found in _in_threads(_tasks(blocks(candidate, parent, alignment, comparison))):
        pairs += len(block.rows)
        size += block.size
        if found is None and block.sets.quiet[block.site]:
            continue
        rows = np.zeros(len(block.rows), np.bool_) if found is None else found
        wrong = rows ^ block.expected()
        if wrong.any() or not block.recorded():
            raise _contradiction(candidate, parent, alignment, block, wrong)
        differ += int(rows.sum())
    return StoredCoverage(pairs=pairs, differ=differ, bytes=size)


def blocks(
    candidate: Capture, parent: Capture, alignment: Alignment, comparison: Comparison
) -> Iterator[Block]:
    """What is to be compared, file after file; rows of another dtype or shape are not, they differ."""
    layout = same_layout(candidate, parent, alignment)
    sites = [(index, name) for index, name in enumerate(alignment.sites) if layout[index]]
    ranks = [list(sets) for _, sets in itertools.groupby(parent.sets, lambda part: part.rank)]
    for ours, others in itertools.product(candidate.sets, ranks):
        if ours.payload is None:
            continue
        starts = np.array([part.start for part in others], np.int64)
        first, end = np.searchsorted(alignment.candidate, [ours.start, ours.start + candidate.known(ours)])
        owners = np.searchsorted(starts, alignment.parent[first:end], side="right") - 1
        for owner in np.unique(owners):
            theirs = others[owner]
            if theirs.payload is not None:
                known = alignment.parent[first:end] < parent.rows_of(theirs.rank)
                pairs = first + np.flatnonzero((owners == owner) & known)
                yield from _of_sets(ours, theirs, alignment, comparison, pairs, sites)


def _of_sets(
    ours: RowSet,
    theirs: RowSet,
    alignment: Alignment,
    comparison: Comparison,
    pairs: np.ndarray,
    sites: list[tuple[int, str]],
) -> Iterator[Block]:
    """The blocks of two sets, of which `pairs` are rows, as they lie in the candidate's file."""
    assert ours.payload is not None
    assert theirs.payload is not None
    file, other = ours.open(ours.payload), theirs.open(theirs.payload)
    rows, other_rows = alignment.candidate[pairs] - ours.start, alignment.parent[pairs] - theirs.start
    differ, compared = comparison.differ[pairs], comparison.compared[pairs]
    quiet = np.asarray(compared.all(axis=0) & ~differ.any(axis=0)).tolist()
    sets = Sets(pairs, differ, compared, quiet, (file.memory(), other.memory()))
    known: dict[tuple[bytes, bytes], list[tuple[int, int, np.ndarray]]] = {}  # most sites keep the same rows
    both = [(file.span(name)[0], index, name) for index, name in sites if name in file and name in other]
    for begin, index, name in sorted(both):
        spans = file.span(name + ROW_INDEX), other.span(name + ROW_INDEX)
        key = sets.files[0][slice(*spans[0])].tobytes(), sets.files[1][slice(*spans[1])].tobytes()
        if key not in known:
            ours.check_kept_rows(name)
            theirs.check_kept_rows(name)
            kept = ours.kept_rows(name), theirs.kept_rows(name)
            known[key] = runs(*kept, rows, other_rows, np.arange(len(pairs)))
        other_begin, width = other.span(name)[0], file.row_bytes(name)
        step = max(1, BLOCK_BYTES // max(1, width))
        for at, other_at, run in known[key]:
            for start in range(0, len(run), step):
                part = run[start : start + step]
                one, two = begin + (at + start) * width, other_begin + (other_at + start) * width
                yield Block(sets, index, part, len(part) * width, one, two)


def runs(
    kept: np.ndarray, other_kept: np.ndarray, rows: np.ndarray, other_rows: np.ndarray, pairs: np.ndarray
) -> list[tuple[int, int, np.ndarray]]:
    """Runs of pairs that both sides kept and that are neighbours in both.

    Args:
        kept: int64, ascending, which rows the candidate kept.
        other_kept: the same of the parent.
        rows: int64 [pairs], the rows of the candidate that pair.
        other_rows: the same of the parent.
        pairs: int64 [pairs], the pairs themselves.

    Returns:
        For each run where its first row lies among those that were kept, on both sides, and its pairs.
    """
    at, other = _places(kept, rows), _places(other_kept, other_rows)
    both = (at >= 0) & (other >= 0)
    at, other, pairs = at[both], other[both], pairs[both]
    if not len(pairs):
        return []
    cuts = np.flatnonzero((np.diff(at) != 1) | (np.diff(other) != 1)) + 1
    edges = [0, *cuts.tolist(), len(pairs)]
    return [(int(at[a]), int(other[a]), pairs[a:b]) for a, b in itertools.pairwise(edges)]


def _places(kept: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """int64 [rows]: where each row lies among those that were kept; -1 where it was not."""
    if not len(kept):
        return np.full(len(rows), -1)
    at = np.minimum(np.searchsorted(kept, rows), len(kept) - 1)
    return np.where(kept[at] == rows, at, -1)


def _tasks(found: Iterable[Block]) -> Iterator[list[Block]]:
    """Blocks in portions that are worth handing to a thread."""
    task: list[Block] = []
    size = 0
    for block in found:
        task.append(block)
        size += block.size
        if size >= TASK_BYTES:
            yield task
            task, size = [], 0
    if task:
        yield task


def _in_threads(tasks: Iterable[list[Block]]) -> Iterator[tuple[Block, np.ndarray | None]]:
    """Every block, in order, with its differing rows; few tasks are planned ahead: memory stays flat."""
    threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
    waiting: deque[tuple[list[Block], Future[list[np.ndarray | None]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for task in tasks:
            waiting.append((task, pool.submit(_compare, task)))
            if len(waiting) > 2 * threads:
                done, future = waiting.popleft()
                yield from zip(done, future.result(), strict=True)
        for done, future in waiting:
            yield from zip(done, future.result(), strict=True)


def _compare(task: list[Block]) -> list[np.ndarray | None]:
    """For each block which of its rows differ; blocks that lie one behind the other are compared at once."""
    found: list[np.ndarray | None] = []
    start = 0
    for end in range(1, len(task) + 1):
        if end < len(task) and _follows(task[end], task[end - 1]):
            continue
        group = task[start:end]
        same = _equal(group[0], sum(block.size for block in group))
        found += [None] * len(group) if same else map(differing, group)
        start = end
    return found


def _follows(block: Block, other: Block) -> bool:
    """Whether a block begins in both files where another ends."""
    return (
        block.sets is other.sets
        and block.at == other.at + other.size
        and block.other_at == other.other_at + other.size
    )


def _equal(first: Block, size: int) -> bool:
    """Whether as many bytes from the beginning of a block on are the same."""
    one, two = first.sets.files
    ours, theirs = one[first.at : first.at + size], two[first.other_at : first.other_at + size]
    return not _memcmp(ours.ctypes.data, theirs.ctypes.data, size)


def differing(block: Block) -> np.ndarray | None:
    """Bool [n]: which rows of a block differ; None if none does."""
    if _equal(block, block.size):
        return None
    one, two = block.sets.files
    ours, theirs = one[block.at : block.at + block.size], two[block.other_at : block.other_at + block.size]
    shape = len(block.rows), -1
    return np.asarray((ours.reshape(shape) != theirs.reshape(shape)).any(axis=1))


def _contradiction(
    candidate: Capture, parent: Capture, alignment: Alignment, block: Block, wrong: np.ndarray
) -> DamagedCapture:
    """Which of the rows of a block does not have its digest."""
    name = alignment.sites[block.site]
    pairs = block.sets.pairs[block.rows]
    for pair in [*pairs[wrong], *pairs[~wrong]]:
        for capture, row in ((candidate, alignment.candidate[pair]), (parent, alignment.parent[pair])):
            try:
                capture.row_payload(name, int(row))
            except DamagedCapture as error:
                return error
    folders = f"{candidate.folder} and {parent.folder}"
    return DamagedCapture(
        f"{folders} hold different rows of {name[:80]!r} with the same digest; do not trust them."
    )
