"""The map of a result, taken apart for drawing: one for the target of each request, one for its draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from localizer.diff.cells import EQUAL, NOT_APPLICABLE, NOT_COMPARED, Cell, MappedRequest, MappedRow
from localizer.diff.places import place
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
        states: of each row, a character for each of these sites.
        cells: of these rows and sites, by index into `rows` and site.
        notes: sentences about what is not in it.
    """

    request: str
    draft: bool
    sites: range
    rows: Sequence[MappedRow]
    states: Sequence[str]
    cells: dict[tuple[int, int], Cell]
    notes: Sequence[str]

    @cached_property
    def counts(self) -> Counter[str]:
        """How many fields have each state."""
        return Counter("".join(self.states))

    @property
    def differ(self) -> int:
        """How many fields differ."""
        return sum(number for state, number in self.counts.items() if state not in QUIET)

    @property
    def title(self) -> str:
        """What the map is of, and what is in it."""
        whose = f"{clean(self.request)}{', draft' if self.draft else ''}"
        left = self.counts[NOT_COMPARED]
        missing = f", {count(left, 'cell')} not compared" if left else ""
        if self.differ:
            verb = "differs" if self.differ == 1 else "differ"
            return f"{whose}: {count(self.differ, 'cell')} {verb}{missing}"
        if not self.counts[EQUAL]:
            return f"{whose}: nothing compared"
        return f"{whose}: equal{' where compared' if left else ''}{missing}"

    @cached_property
    def lines(self) -> list[tuple[range, str]]:
        """Sites and their states, a character a row; equal neighbours without a difference together."""

        def same(item: tuple[int, str]) -> tuple[str, int]:
            site, states = item
            return states, -1 if QUIET.issuperset(states) else site

        found = []
        columns = map("".join, zip(*self.states, strict=True))
        for (states, _), run in groupby(zip(self.sites, columns, strict=True), same):
            sites = [site for site, _ in run]
            found.append((range(sites[0], sites[-1] + 1), states))
        return found


def maps(result: Result) -> list[Map]:
    """All maps of a result in the order of its requests; of each that which differs first comes first."""
    found = result.cells
    if found is None:
        return []
    target = sum(not place(name).draft for name in found.sites)  # a draft's sites follow
    parts = {False: range(target), True: range(target, len(found.sites))}
    made = []
    for request in found.requests:
        draft_first = bool(request.cells) and request.cells[0].site >= target
        both = [_part(result, request, parts[draft], draft) for draft in (draft_first, not draft_first)]
        made += [part for part in both if part.rows and part.sites]
    return made


def _part(result: Result, request: MappedRequest, sites: range, draft: bool) -> Map:
    numbers = [i for i, row in enumerate(request.rows) if row.kind.startswith("draft") == draft]
    new = {old: number for number, old in enumerate(numbers)}
    rows = [request.rows[number] for number in numbers]
    return Map(
        request=request.request,
        draft=draft,
        sites=sites,
        rows=rows,
        states=[row.states[sites.start : sites.stop] for row in rows],
        cells={
            (new[cell.row], cell.site): cell
            for cell in request.cells
            if cell.row in new and cell.site in sites
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
            "described, the causally first; the others are shown as different bytes or lie outside."
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


def shown(drawn: Sequence[Map]) -> set[str]:
    """Which states occur in some maps."""
    return set[str]().union(*(one.counts for one in drawn))


def label(name: str) -> str:
    """A site in few words, without an article."""
    return wording.site(place(name)).removeprefix("the ")


def group(name: str) -> tuple[bool, int | None, str]:
    """Neighbouring sites of one group belong to one layer."""
    where = place(name)
    return where.draft, where.number, "" if where.number is not None else where.stage
