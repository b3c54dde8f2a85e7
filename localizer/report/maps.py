"""The map of a result, taken apart for drawing: one for the target of each request, one for its draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from localizer.diff.cells import EQUAL, NOT_APPLICABLE, NOT_COMPARED, Cell, MappedRequest, MappedRow
from localizer.diff.places import Place, place
from localizer.diff.result import Result
from localizer.report import within, wording
from localizer.report.counts import count
from localizer.report.safe import clean

QUIET = frozenset({EQUAL, NOT_COMPARED, NOT_APPLICABLE})
"""States of rows that do not differ."""


@dataclass(frozen=True)
class Map:
    """Rows of one request at the sites of one model.

    Attributes:
        request: its id (untrusted).
        draft: whether sites and rows are the draft's.
        sites: indices into the result's sites.
        rows: in causal order.
        cells: of these rows and sites, by index into `rows` and site.
        notes: sentences about what is not in it.
    """

    request: str
    draft: bool
    sites: Sequence[int]
    rows: Sequence[MappedRow]
    cells: dict[tuple[int, int], Cell]
    notes: Sequence[str]

    @property
    def differ(self) -> int:
        """How many cells differ."""
        return sum(row.states[site] not in QUIET for row in self.rows for site in self.sites)

    @property
    def title(self) -> str:
        """What the map is of, and what is in it."""
        whose = f"{clean(self.request)}{', draft' if self.draft else ''}"
        states = Counter(row.states[site] for row in self.rows for site in self.sites)
        differ = sum(number for state, number in states.items() if state not in QUIET)
        missing = f", {count(states[NOT_COMPARED], 'cell')} not compared" if states[NOT_COMPARED] else ""
        if differ:
            return f"{whose}: {count(differ, 'cell')} {'differs' if differ == 1 else 'differ'}{missing}"
        return (
            f"{whose}: equal{' where compared' * bool(missing)}{missing}"
            if states[EQUAL]
            else f"{whose}: nothing compared"
        )

    def runs(self) -> Iterator[tuple[Sequence[int], str]]:
        """Sites and their states, a character a row; equal neighbours without a difference together."""
        column = {site: "".join(row.states[site] for row in self.rows) for site in self.sites}

        def same(site: int) -> tuple[str, int]:
            return column[site], -1 if set(column[site]) <= QUIET else site

        for (states, _), sites in groupby(self.sites, same):
            yield list(sites), states


def maps(result: Result) -> list[Map]:
    """All maps of a result in the order of its requests; of each that which differs first comes first."""
    found = result.cells
    if found is None:
        return []
    drafts = [place(name).draft for name in found.sites]
    made = []
    for request in found.requests:
        first_is_draft = bool(request.cells) and drafts[request.cells[0].site]
        parts = [_part(result, request, drafts, draft) for draft in (first_is_draft, not first_is_draft)]
        made += [part for part in parts if part.rows and part.sites]
    return made


def _part(result: Result, request: MappedRequest, drafts: list[bool], draft: bool) -> Map:
    numbers = [i for i, row in enumerate(request.rows) if row.kind.startswith("draft") == draft]
    new = {old: number for number, old in enumerate(numbers)}
    return Map(
        request=request.request,
        draft=draft,
        sites=[site for site, of_draft in enumerate(drafts) if of_draft == draft],
        rows=[request.rows[number] for number in numbers],
        cells={
            (new[cell.row], cell.site): cell
            for cell in request.cells
            if cell.row in new and drafts[cell.site] == draft
        },
        notes=list(_notes(result, request)),
    )


def _notes(result: Result, request: MappedRequest) -> Iterator[str]:
    if request.rows_before or request.rows_after:
        yield (
            f"Not in this map: {count(request.rows_before, 'row')} of the request before these, "
            f"{request.rows_after:,} behind them."
        )
    if request.cells_left_out:
        yield (
            f"{len(request.cells):,} of {count(request.differ, 'differing cell')} of this request are "
            f"described, the causally first; the others are shown as different bytes or lie outside."
        )
    unpaired = sum(row.parent_request is None for row in request.rows)
    if unpaired:
        other = "no earlier row of equal prefix" if within.is_within(result) else "no counterpart"
        yield f"{count(unpaired, 'row')} of this request {'has' if unpaired == 1 else 'have'} {other}."


def left_out(result: Result) -> str:
    """A sentence about requests that have no map; empty where all have."""
    if result.cells is None or not result.cells.requests_left_out:
        return ""
    return (
        f"{count(result.cells.requests_left_out, 'further request')} without a map; the numbers count them."
    )


def label(name: str) -> str:
    """A site in few words, without an article."""
    return wording.site(place(name)).removeprefix("the ")


def group(name: str) -> tuple[bool, int | None, str]:
    """Neighbouring sites of one group belong to one layer."""
    where: Place = place(name)
    return where.draft, where.number, "" if where.number is not None else where.stage


def shown(result: Result) -> set[str]:
    """Which states occur in the maps of a result."""
    requests = result.cells.requests if result.cells is not None else []
    return set().union(*(row.states for request in requests for row in request.rows))
