"""Stored rows against stored rows, byte for byte: digests are not trusted but held against what was found."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

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
class Block:
    """Pairs of rows of one site that are neighbours in both files.

    Attributes:
        site: index into the shared sites.
        pairs: int64 [n], indices into the alignment.
        expected: bool [n], which of them differ as the digests say.
        recorded: whether both captures have digests of all of them.
        width: bytes of a row.
        files: both files, each uint8, mapped.
        at: where the rows begin in the two.
    """

    site: int
    pairs: np.ndarray
    expected: np.ndarray
    recorded: bool
    width: int
    files: tuple[np.ndarray, np.ndarray]
    at: tuple[int, int]

    @property
    def size(self) -> int:
        """Bytes of one side."""
        return len(self.pairs) * self.width


def compare_stored(
    candidate: Capture, parent: Capture, alignment: Alignment, comparison: Comparison
) -> StoredCoverage:
    """Compare every pair of rows that both captures kept, in several threads.

    Raises:
        DamagedCapture: bytes and digests do not say the same.
    """
    pairs = differ = size = 0
    for block, rows in _in_threads(_tasks(blocks(candidate, parent, alignment, comparison))):
        if not block.recorded or not np.array_equal(rows, block.expected):
            raise _contradiction(candidate, parent, alignment, block, rows ^ block.expected)
        pairs += len(rows)
        differ += int(rows.sum())
        size += block.size
    return StoredCoverage(pairs=pairs, differ=differ, bytes=size)


def blocks(
    candidate: Capture, parent: Capture, alignment: Alignment, comparison: Comparison
) -> Iterator[Block]:
    """What is to be compared, file after file; rows of another dtype or shape are not, they differ."""
    layout = same_layout(candidate, parent, alignment)
    sites = [(index, name) for index, name in enumerate(alignment.sites) if layout[index]]
    starts = np.array([part.start for part in parent.sets], np.int64)
    for ours in candidate.sets:
        if ours.payload is None:
            continue
        first, end = np.searchsorted(alignment.candidate, [ours.start, ours.start + ours.count])
        owners = np.searchsorted(starts, alignment.parent[first:end], side="right") - 1
        for owner in np.unique(owners):
            theirs = parent.sets[owner]
            if theirs.payload is not None:
                pairs = first + np.flatnonzero(owners == owner)
                yield from _of_sets(ours, theirs, alignment, comparison, pairs, sites)


def _of_sets(
    ours: RowSet,
    theirs: RowSet,
    alignment: Alignment,
    comparison: Comparison,
    pairs: np.ndarray,
    sites: list[tuple[int, str]],
) -> Iterator[Block]:
    """The blocks of two sets, of which `pairs` are rows."""
    assert ours.payload is not None
    assert theirs.payload is not None
    file, other = ours.open(ours.payload), theirs.open(theirs.payload)
    memory = file.memory(), other.memory()
    rows, other_rows = alignment.candidate[pairs] - ours.start, alignment.parent[pairs] - theirs.start
    differ, compared = comparison.differ[pairs], comparison.compared[pairs]
    everything = np.arange(len(pairs))
    known: dict[tuple[bytes, bytes], list[tuple[int, int, np.ndarray]]] = {}  # most sites keep the same rows
    both = [(file.span(name)[0], index, name) for index, name in sites if name in file and name in other]
    for begin, index, name in sorted(both):
        spans = file.span(name + ROW_INDEX), other.span(name + ROW_INDEX)
        key = memory[0][slice(*spans[0])].tobytes(), memory[1][slice(*spans[1])].tobytes()
        if key not in known:
            ours.check_kept_rows(name)
            theirs.check_kept_rows(name)
            known[key] = runs(ours.kept_rows(name), theirs.kept_rows(name), rows, other_rows, everything)
        other_begin, width = other.span(name)[0], file.row_bytes(name)
        step = max(1, BLOCK_BYTES // max(1, width))
        for at, other_at, run in known[key]:
            for start in range(0, len(run), step):
                part = run[start : start + step]
                yield Block(
                    site=index,
                    pairs=pairs[part],
                    expected=differ[part, index],
                    recorded=bool(compared[part, index].all()),
                    width=width,
                    files=memory,
                    at=(begin + (at + start) * width, other_begin + (other_at + start) * width),
                )


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


def _in_threads(tasks: Iterable[list[Block]]) -> Iterator[tuple[Block, np.ndarray]]:
    """Every block, in order, with its differing rows; few tasks are planned ahead: memory stays flat."""
    threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
    waiting: deque[tuple[list[Block], Future[list[np.ndarray]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for task in tasks:
            waiting.append((task, pool.submit(_compare, task)))
            if len(waiting) > 2 * threads:
                done, future = waiting.popleft()
                yield from zip(done, future.result(), strict=True)
        for done, future in waiting:
            yield from zip(done, future.result(), strict=True)


def _compare(task: list[Block]) -> list[np.ndarray]:
    """For each block which of its rows differ; blocks that lie one behind the other are compared at once."""
    found: list[np.ndarray] = []
    start = 0
    for end in range(1, len(task) + 1):
        if end < len(task) and _follows(task[end], task[end - 1]):
            continue
        group = task[start:end]
        if _equal(group[0], sum(block.size for block in group)):
            found += [np.zeros(len(block.pairs), np.bool_) for block in group]
        else:
            found += map(differing, group)
        start = end
    return found


def _follows(block: Block, other: Block) -> bool:
    """Whether a block begins in both files where another ends."""
    return block.files is other.files and all(
        here == there + other.size for here, there in zip(block.at, other.at, strict=True)
    )


def _equal(first: Block, size: int) -> bool:
    """Whether as many bytes from the beginning of a block on are the same."""
    one, two = (file[at : at + size].ctypes.data for file, at in zip(first.files, first.at, strict=True))
    return not _memcmp(one, two, size)


def differing(block: Block) -> np.ndarray:
    """Bool [pairs]: which rows of a block differ; they are looked at one by one only if some do."""
    if _equal(block, block.size):
        return np.zeros(len(block.pairs), np.bool_)
    ours, theirs = (
        file[at : at + block.size].reshape(len(block.pairs), block.width)
        for file, at in zip(block.files, block.at, strict=True)
    )
    return np.asarray((ours != theirs).any(axis=1))


def _contradiction(
    candidate: Capture, parent: Capture, alignment: Alignment, block: Block, wrong: np.ndarray
) -> DamagedCapture:
    """Which of the rows of a block does not have its digest."""
    name = alignment.sites[block.site]
    for pair in [*block.pairs[wrong], *block.pairs[~wrong]]:
        for capture, row in ((candidate, alignment.candidate[pair]), (parent, alignment.parent[pair])):
            try:
                capture.row_payload(name, int(row))
            except DamagedCapture as error:
                return error
    folders = f"{candidate.folder} and {parent.folder}"
    return DamagedCapture(
        f"{folders} hold different rows of {name[:80]!r} with the same digest; do not trust them."
    )
