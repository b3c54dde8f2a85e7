"""Which row of the candidate is asked to compute the same as which row of the parent, and at which sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from localizer.store import schema, scratch
from localizer.store.reader import Capture, Table
from localizer.wire import ranks

BY_REQUEST, BY_PREFIX, WITHIN = "request+prefix", "prefix", "within"

BLOCK = 1 << 18
"""Rows whose keys are held in memory at a time where both sides have the same."""


@dataclass(frozen=True)
class Alignment:
    """The plan of a comparison.

    Attributes:
        by: "request+prefix" or "prefix", rows of equal key pair in the order in which they were computed; or
            "within", see `localizer.diff.within`.
        candidate, parent: int64 [pairs], row i of the one pairs with row i of the other; `candidate` ascends.
        unpaired_candidate, unpaired_parent: int64, the other rows.
        sites: names of the shared sites, in the candidate's execution order.
        candidate_sites, parent_sites: int64 [sites], their columns in the two tables.
        candidate_only, parent_only: names of the sites that only one side holds.
        other_digest: sites that both hold, but with digests of these two algorithms: never compared.
        owners: the candidate's rank that recorded each shared site, by name; empty where there is one rank.
    """

    by: str
    candidate: np.ndarray
    parent: np.ndarray
    unpaired_candidate: np.ndarray
    unpaired_parent: np.ndarray
    sites: tuple[str, ...]
    candidate_sites: np.ndarray
    parent_sites: np.ndarray
    candidate_only: tuple[str, ...]
    parent_only: tuple[str, ...]
    other_digest: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    owners: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.candidate)


def workloads_equal(candidate: Capture, parent: Capture) -> bool:
    """Whether both sources got the same rounds of the same prompts, so that request ids mean the same."""
    one, other = candidate.open.workload, parent.open.workload
    if schema.rounds(one.matrix, one.repeats) != schema.rounds(other.matrix, other.repeats):
        return False
    used = max(one.matrix, default=0)
    return one.prompts[:used] == other.prompts[:used]


def align(candidate: Capture, parent: Capture) -> Alignment:
    """Pair rows and sites of two captures."""
    equal = workloads_equal(candidate, parent)
    left, right = pair_rows(candidate.table, parent.table, with_request=equal)
    ours = {site.name: index for index, site in enumerate(candidate.sites)}
    theirs = {site.name: index for index, site in enumerate(parent.sites)}
    both = [name for name in ours if name in theirs]
    algorithms = {
        name: (candidate.sites[ours[name]].digest, parent.sites[theirs[name]].digest) for name in both
    }
    shared = tuple(name for name in both if len(set(algorithms[name])) == 1)
    return Alignment(
        by=BY_REQUEST if equal else BY_PREFIX,
        candidate=left,
        parent=right,
        unpaired_candidate=others(left, len(candidate.table)),
        unpaired_parent=others(right, len(parent.table)),
        sites=shared,
        candidate_sites=np.array([ours[name] for name in shared], np.int64),
        parent_sites=np.array([theirs[name] for name in shared], np.int64),
        candidate_only=tuple(name for name in ours if name not in theirs),
        parent_only=tuple(name for name in theirs if name not in ours),
        other_digest={name: algorithms[name] for name in both if name not in shared},
        owners=owners(candidate),
    )


def owners(capture: Capture) -> dict[str, int]:
    """The rank that recorded each site, by name; empty where there is one rank."""
    if capture.open.observer.ranks == 1:
        return {}
    return {site.name: rank for site, rank in zip(capture.sites, capture.site_ranks, strict=True)}


def split_otherwise(alignment: Alignment) -> dict[str, tuple[int, int]]:
    """Sites of which each side holds other parts, by their names on a single worker.

    Returns:
        In how many ranges of heads candidate and parent hold them; 0 where it is not known what a part is.
    """
    ours, theirs = (
        {held.base: 0 if held.ranks else held.of for held in map(ranks.parse, names)}
        for names in (alignment.candidate_only, alignment.parent_only)
    )
    return {base: (of, theirs[base]) for base, of in ours.items() if base in theirs and of != theirs[base]}


def pair_rows(candidate: Table, parent: Table, *, with_request: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows (candidate, parent) of equal key, the k-th occurrence with the k-th; int64 [pairs] each.

    The key is that of `keyed`. Rows without one never pair.
    """
    left, right = comparable_rows(candidate), comparable_rows(parent)
    if _equal_keys(candidate, left, parent, right, with_request):
        return left, right  # the usual case: the same rows in the same order
    ours, theirs = _keys(candidate, left, with_request), _keys(parent, right, with_request)
    one, other = _grouped(ours, theirs)
    width = len(one) + len(other) + 1
    _, at_left, at_right = np.intersect1d(
        one * width + _ranks(one), other * width + _ranks(other), assume_unique=True, return_indices=True
    )
    by_row = np.argsort(at_left)
    return left[at_left[by_row]], right[at_right[by_row]]


def keyed(*tables: Table, with_request: bool) -> list[np.ndarray]:
    """For each table the numbers of its rows' keys, int64 [rows], equal where the keys are; 0 for no key.

    The key is the prefix, the model that computed the row (the target, or which step of the draft), and the
    request's index where `with_request`.
    """
    rows = [np.flatnonzero(comparable(table)) for table in tables]
    keys = [_keys(table, these, with_request) for table, these in zip(tables, rows, strict=True)]
    found = []
    for table, these, group in zip(tables, rows, _grouped(*keys), strict=True):
        numbers = np.zeros(len(table), np.int64)
        numbers[these] = group
        found.append(numbers)
    return found


def comparable(table: Table) -> np.ndarray:
    """Bool [rows]: whether the prefix is known (an unknown one is all zero) and the row is no padding."""
    words = _words(table)
    return ((words[:, 0] | words[:, 1]) != 0) & (table.columns["kind"] != schema.DRAFT_PADDING)


def comparable_rows(table: Table) -> np.ndarray:
    """int64 [n]: the rows of which that is so."""
    found = np.flatnonzero(comparable(table))
    rows = scratch.zeros(len(found), np.int64)
    rows[:] = found
    return rows


def _equal_keys(one: Table, rows: np.ndarray, other: Table, others: np.ndarray, with_request: bool) -> bool:
    """Whether rows of two tables have the same keys, one after the other; looked at block by block."""
    if len(rows) != len(others):
        return False
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        keys = zip(
            _keys(one, rows[part], with_request), _keys(other, others[part], with_request), strict=True
        )
        if not all(np.array_equal(ours, theirs) for ours, theirs in keys):
            return False
    return True


def _grouped(*sides: list[np.ndarray]) -> list[np.ndarray]:
    """For the keys of each side numbers from 1 on, the same for equal keys."""
    keys = [np.concatenate(parts) for parts in zip(*sides, strict=True)]
    order = np.lexsort(keys)
    starts = np.ones(len(order), np.bool_)
    starts[1:] = np.any([key[order[1:]] != key[order[:-1]] for key in keys], axis=0)
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(starts)
    return np.split(group, np.cumsum([len(side[0]) for side in sides])[:-1])


def _words(table: Table) -> np.ndarray:
    """The prefixes as uint64 [rows, 2]."""
    return np.ascontiguousarray(table.prefix).view(np.uint64)


def _keys(table: Table, rows: np.ndarray, with_request: bool) -> list[np.ndarray]:
    words = _words(table)
    model = np.maximum(table.columns["kind"][rows], schema.DRAFT_PADDING)  # all kinds of the target are one
    keys = [words[rows, 0], words[rows, 1], model]
    return [*keys, table.columns["request"][rows]] if with_request else keys


def _ranks(group: np.ndarray) -> np.ndarray:
    """For each item its number, from 0, among the items of the same group, in order."""
    order = np.argsort(group, kind="stable")
    found = group[order]
    starts = np.flatnonzero(np.r_[True, found[1:] != found[:-1]]) if len(found) else np.zeros(0, np.int64)
    lengths = np.diff(np.r_[starts, len(found)])
    ranks = np.empty(len(group), np.int64)
    ranks[order] = np.arange(len(group)) - np.repeat(starts, lengths)
    return ranks


def others(rows: np.ndarray, total: int) -> np.ndarray:
    """The rows of a table of `total` that are not among `rows`."""
    rest = np.ones(total, np.bool_)
    rest[rows] = False
    return np.flatnonzero(rest)
