"""Fills the map of a finished diff: what each row of each request says at each site."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from localizer.diff.cells import (
    CLASS_STATES,
    DIFFERENT,
    EQUAL,
    NOT_APPLICABLE,
    NOT_COMPARED,
    Cell,
    Cells,
    MappedRequest,
    MappedRow,
)
from localizer.diff.details import Details
from localizer.diff.explain import Steps
from localizer.diff.order import causal_sort
from localizer.diff.places import place
from localizer.store.expected import applicable
from localizer.store.reader import Capture
from localizer.store.schema import DRAFT_PADDING, KINDS

MOST_REQUESTS = 256
"""Requests that are listed."""

MOST_STATES = 1 << 21
"""Characters of all rows together; of the request that exceeds them, and of later ones, nothing is listed."""

MOST_ROWS = 512
"""Rows of a request that are listed."""

ROWS_BEFORE = 32
"""How many of these stand before the first that differs, where not all can be listed."""

MOST_CELLS = 8192
"""Differing rows of sites that are described, of all requests together."""

CELLS_A_REQUEST = 2048
"""The same of one request."""


def mapped(steps: Steps, details: Details) -> Cells:
    """The map; within its bounds the causally first is kept, and what is left out is counted."""
    filler = _Filler(steps, details)
    found: list[MappedRequest] = []
    room, cells = MOST_STATES, MOST_CELLS
    requests = filler.requests()
    for request in requests[:MOST_REQUESTS]:
        start, end = filler.window(request)
        room -= (end - start) * len(filler.sites)
        if room < 0 and found:
            break
        found.append(filler.request(request, start, end, min(cells, CELLS_A_REQUEST)))
        cells -= len(found[-1].cells)
    return Cells(
        sites=[steps.alignment.sites[site] for site in filler.sites],
        requests=found,
        requests_left_out=len(requests) - len(found),
        cells_left_out=int(steps.comparison.differ_rows.sum()) - sum(len(item.cells) for item in found),
    )


class _Filler:
    """Rows of the candidate by request, and what the comparison says of them.

    Attributes:
        sites: indices into the shared sites, the target's and then the draft's.
    """

    def __init__(self, steps: Steps, details: Details) -> None:
        self._steps, self._details = steps, details
        alignment, columns = steps.alignment, steps.candidate.table.columns
        names = [] if steps.obstacles else alignment.sites
        self.sites = [
            i for draft in (False, True) for i, name in enumerate(names) if place(name).draft == draft
        ]
        self._pair = np.full(len(steps.candidate.table), -1, np.int64)
        self._pair[alignment.candidate] = np.arange(len(alignment))
        rows = np.flatnonzero(columns["kind"] != DRAFT_PADDING)
        rows = rows[causal_sort(steps.candidate, rows)]
        by_request = np.argsort(columns["request"][rows], kind="stable")
        self._rows = rows[by_request]
        counts = np.bincount(columns["request"][rows], minlength=len(steps.candidate.requests))
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._differing = steps.comparison.differ.any()

    def requests(self) -> list[int]:
        """Requests with rows: those that differ in causal order, then those compared, then others."""
        order = self._steps.order.request
        _, where = np.unique(order, return_index=True)
        first = order[np.sort(where)].tolist()
        others = set(np.flatnonzero(self._ends > self._starts).tolist()) - set(first) if self.sites else set()
        compared = {number for number in others if (self._pair[self._of(number)] >= 0).any()}
        return [*first, *sorted(compared), *sorted(others - compared)]

    def _of(self, request: int) -> np.ndarray:
        """int64: the rows of a request in causal order."""
        return self._rows[self._starts[request] : self._ends[request]]

    def window(self, request: int) -> tuple[int, int]:
        """Which rows of a request are listed: all, or `MOST_ROWS` around the first that differs."""
        rows = self._of(request)
        if len(rows) <= MOST_ROWS:
            return 0, len(rows)
        pairs = self._pair[rows]
        differ = np.flatnonzero((pairs >= 0) & self._differing[pairs])
        first = int(differ[0]) if len(differ) else 0
        start = max(0, min(first - ROWS_BEFORE, len(rows) - MOST_ROWS))
        return start, start + MOST_ROWS

    def request(self, number: int, start: int, end: int, most: int) -> MappedRequest:
        """A request with its rows `start` to `end`, and at most so many cells."""
        candidate, parent = self._steps.candidate, self._steps.parent
        every = self._of(number)
        rows = every[start:end]
        states, differ = self._states(rows)
        cells: list[Cell] = []
        for row, site in zip(*(axis.tolist() for axis in np.nonzero(differ)), strict=True):
            if len(cells) == most:
                break
            cell = self._cell(rows, row, site)
            cells.append(cell)
            if cell.class_ is not None:
                states[row, site] = ord(CLASS_STATES[cell.class_])
        total = self._differ(every)
        return MappedRequest(
            request=candidate.requests[number],
            rows=list(_rows(candidate, parent, rows, self._others(rows), states)),
            rows_before=start,
            rows_after=len(every) - end,
            differ=total,
            cells=cells,
            cells_left_out=total - len(cells),
        )

    def _differ(self, rows: np.ndarray) -> int:
        """How many row x site pairs of these rows differ."""
        pairs = self._pair[rows]
        pairs = pairs[pairs >= 0]
        return int(self._steps.comparison.differ[pairs[self._differing[pairs]]].sum())

    def _others(self, rows: np.ndarray) -> np.ndarray:
        """int64: the parent's row of each; -1 for none."""
        pairs = self._pair[rows]
        found = np.full(len(rows), -1, np.int64)
        found[pairs >= 0] = self._steps.alignment.parent[pairs[pairs >= 0]]
        return found

    def _states(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """uint8 [rows, sites], a character each; and bool [rows, sites], where rows differ."""
        comparison, pairs = self._steps.comparison, self._pair[rows]
        paired = pairs >= 0
        states = np.full((len(rows), len(self.sites)), ord(NOT_COMPARED), np.uint8)
        states[~self._applicable(rows)] = ord(NOT_APPLICABLE)
        differ = np.zeros(states.shape, np.bool_)
        compared = differ.copy()
        compared[paired] = comparison.compared[pairs[paired]][:, self.sites]
        differ[paired] = comparison.differ[pairs[paired]][:, self.sites]
        states[compared] = ord(EQUAL)
        states[differ] = ord(DIFFERENT)
        return states, differ

    def _applicable(self, rows: np.ndarray) -> np.ndarray:
        """Bool [rows, sites]: whether the site exists on the row, and on its counterpart if it has one."""
        steps, alignment = self._steps, self._steps.alignment
        others = self._others(rows)
        found = np.ones((len(rows), len(self.sites)), np.bool_)
        sides = (
            (steps.candidate, alignment.candidate_sites, rows, np.ones(len(rows), np.bool_)),
            (steps.parent, alignment.parent_sites, others, others >= 0),
        )
        for capture, columns, these, known in sides:
            skipped = capture.manifest.not_applicable if capture.manifest is not None else {}
            facts = {name: capture.table.columns[name][these[known]] for name in ("kind", "logits")}
            on = {which: applicable(facts, which) for which in {site.rows for site in capture.sites}}
            for column, index in enumerate(self.sites):
                site = capture.sites[columns[index]]
                found[known, column] &= on[site.rows] & (site.name not in skipped)
        return found

    def _cell(self, rows: np.ndarray, row: int, site: int) -> Cell:
        mine = int(rows[row])
        other = int(self._steps.alignment.parent[self._pair[mine]])
        detail = self._details.of(self._steps.alignment.sites[self.sites[site]], mine, other)
        return Cell(
            row=row,
            site=site,
            class_=detail.class_,
            elements_differ=detail.elements_differ,
            elements=detail.elements,
            first_element=detail.first_element,
            max_ulp=detail.max_ulp,
            max_abs=detail.max_abs,
            max_rel=detail.max_rel,
            cosine=detail.cosine,
            values=detail.values,
            within_tolerance=detail.within_tolerance,
        )


def _rows(
    candidate: Capture, parent: Capture, rows: np.ndarray, others: np.ndarray, states: np.ndarray
) -> Iterator[MappedRow]:
    ours, theirs = candidate.table.columns, parent.table.columns
    for row, other, said in zip(rows.tolist(), others.tolist(), states, strict=True):
        yield MappedRow(
            position=int(ours["position"][row]),
            step=int(ours["step"][row]),
            kind=KINDS[ours["kind"][row]],
            parent_request=parent.requests[theirs["request"][other]] if other >= 0 else None,
            parent_step=int(theirs["step"][other]) if other >= 0 else None,
            states=said.tobytes().decode("ascii"),
        )
