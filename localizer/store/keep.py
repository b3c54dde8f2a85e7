"""What of several captures fits into an archive: digests near the first differences, payload by rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localizer.store.dtypes import NUMPY
from localizer.store.expected import is_draft
from localizer.store.reader import Capture
from localizer.store.schema import Site

INDEX_BYTES = 8
"""Bytes beside a stored row: its index."""

FIRST, READ, NEIGHBOUR, REST = range(4)
"""Importance of stored rows: of the first difference; read by the diff; beside those; all others."""


class ReadCapture(Capture):
    """A capture that notes which stored rows are read: those are what a diff says its numbers of."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.read: dict[tuple[int, str], None] = {}

    def row_payload(self, site: str, row: int) -> np.ndarray | None:
        """The stored row of a site, as `Capture.row_payload` gives it."""
        found = super().row_payload(site, row)
        if found is not None:
            self.read[row, site] = None
        return found

    def cells(self) -> np.ndarray:
        """int64 [read, 2]: row and site of what was read, in that order."""
        column = {site.name: number for number, site in enumerate(self.sites)}
        return np.array([(row, column[site]) for row, site in self.read], np.int64).reshape(-1, 2)

    def were_read(self) -> np.ndarray:
        """Bool [rows, sites]: what was read."""
        found = np.zeros((len(self.table), len(self.sites)), np.bool_)
        cells = self.cells()
        found[cells[:, 0], cells[:, 1]] = True
        return found


def importance(capture: ReadCapture) -> np.ndarray:
    """uint8 [rows, sites]: how important the stored rows of a capture are.

    Neighbours of what was read are all sites of the same row, and of the rows of its request at the positions
    beside it.
    """
    found = np.full((len(capture.table), len(capture.sites)), REST, np.uint8)
    cells = capture.cells()
    if not len(cells):
        return found
    columns = capture.table.columns
    key = np.left_shift(columns["request"].astype(np.int64), 32) + columns["position"]
    rows = np.unique(cells[:, 0])
    beside = np.isin(key, np.concatenate([key[rows] - 1, key[rows], key[rows] + 1]))
    target = ~is_draft(columns)
    found[beside & target] = NEIGHBOUR
    found[rows] = NEIGHBOUR
    found[cells[:, 0], cells[:, 1]] = READ
    found[cells[0, 0], cells[0, 1]] = FIRST
    return found


def widths(sites: Sequence[Site]) -> np.ndarray:
    """int64 [sites]: bytes of a stored row with its index."""
    return np.array(
        [
            INDEX_BYTES + int(np.prod(site.shape or (), dtype=np.int64)) * NUMPY[site.dtype].itemsize
            if site.dtype
            else INDEX_BYTES
            for site in sites
        ],
        np.int64,
    )


def payload_bytes(capture: Capture, cells: np.ndarray) -> int:
    """Bytes of some stored rows of a capture, with their indices; `cells` is bool [rows, sites]."""
    return int((cells.sum(axis=0) * widths(capture.sites)).sum())


def choose_payload(
    captures: Sequence[Capture], wanted: Sequence[np.ndarray], order: Sequence[np.ndarray], budget: int | None
) -> list[np.ndarray]:
    """The stored rows that fit.

    Args:
        captures: in the order of the archive.
        wanted: bool [rows, sites] for each, what may be kept.
        order: uint8 [rows, sites] for each, see `importance`.
        budget: bytes; None keeps all.

    Returns:
        Bool [rows, sites] for each: the most important ones; of equally important ones earlier rows, of all
        captures alike.
    """
    if budget is None:
        return list(wanted)
    rows, sites, owner, rank, size = [], [], [], [], []
    for number, (capture, cells, important) in enumerate(zip(captures, wanted, order, strict=True)):
        row, site = np.nonzero(cells)
        rows.append(row)
        sites.append(site)
        owner.append(np.full(len(row), number))
        rank.append(important[row, site])
        size.append(widths(capture.sites)[site])
    row, site, capture_of, ranks, sizes = map(np.concatenate, (rows, sites, owner, rank, size))
    sequence = np.lexsort((site, capture_of, row, ranks))
    chosen = sequence[np.cumsum(sizes[sequence]) <= budget]
    found = [np.zeros_like(cells) for cells in wanted]
    for number, cells in enumerate(found):
        mine = chosen[capture_of[chosen] == number]
        cells[row[mine], site[mine]] = True
    return found


def choose_digests(
    captures: Sequence[Capture], near: Sequence[tuple[str, int]], most: int, *, by_request: bool
) -> list[np.ndarray]:
    """The rows that keep their digests: all of them, or those of the same places in all captures.

    Args:
        captures: in the order of the archive.
        near: (request, position) of first differences, the most important first.
        most: row x site digests that the archive may hold.
        by_request: whether a place is a request and a position, as in equal workloads; else it is a prefix.

    Returns:
        Bool [rows] for each. First come places of the requests in `near`, in that order, the nearer to the
        named position the sooner; then the others.
    """
    if sum(len(capture.table) * len(capture.sites) for capture in captures) <= most:
        return [np.ones(len(capture.table), np.bool_) for capture in captures]
    anchor: dict[str, int] = {}
    for request, place in near:
        anchor.setdefault(request, place)
    rank = {request: number for number, request in enumerate(anchor)}
    keys, ranks, distances, costs = [], [], [], []
    numbers: dict[str, int] = {}
    for capture in captures:
        columns = capture.table.columns
        position = columns["position"].astype(np.int64)
        ours = np.array([numbers.setdefault(name, len(numbers)) for name in capture.requests], np.int64)
        by_name = [(rank.get(name, len(rank)), anchor.get(name, 0)) for name in capture.requests]
        table = np.array(by_name, np.int64).reshape(-1, 2)[columns["request"]]
        words = np.ascontiguousarray(capture.table.prefix).view(np.int64)
        keys.append(np.stack([ours[columns["request"]], position], axis=1) if by_request else words)
        ranks.append(table[:, 0])
        distances.append(np.abs(position - table[:, 1]))
        costs.append(np.full(len(position), len(capture.sites), np.int64))
    _, group = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
    group = group.reshape(-1)
    count = int(group.max()) + 1
    cost = np.bincount(group, weights=np.concatenate(costs), minlength=count).astype(np.int64)
    nearest = np.full(count, np.iinfo(np.int64).max)
    importance_of = np.left_shift(np.concatenate(ranks), 32) + np.concatenate(distances)
    np.minimum.at(nearest, group, importance_of)
    order = np.argsort(nearest, kind="stable")
    kept = np.zeros(count, np.bool_)
    kept[order[np.cumsum(cost[order]) <= most]] = True
    return np.split(kept[group], np.cumsum([len(part) for part in keys])[:-1])
