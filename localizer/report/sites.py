"""The table of sites, with runs of like sites drawn together so that a large model stays readable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from localizer.diff.places import place
from localizer.diff.result import SiteResult
from localizer.report import tolerance
from localizer.report.blocks import Table
from localizer.report.safe import clean

SHOWN = 12
"""Differing sites that get a line of their own, the first in execution order."""


def table(sites: Sequence[SiteResult]) -> Table:
    """One line for each of the first differing sites, one for each run of other sites."""
    differing = [index for index, site in enumerate(sites) if site.rows_differ]
    own = set(differing[:SHOWN])
    with_missing = any(site.missing.candidate or site.missing.parent for site in sites)

    def kind(item: tuple[int, SiteResult]) -> tuple[object, ...]:
        index, site = item
        return (
            index if index in own else -1,
            bool(site.rows_differ),
            site.rows_compared == 0,
            place(site.name).draft,
            _missing(site),
        )

    rows: list[list[str]] = []
    loud: set[int] = set()
    for _, group in groupby(enumerate(sites), kind):
        run = [site for _, site in group]
        if run[0].rows_differ:
            loud.add(len(rows))
        rows.append(_line(run, with_missing))
    header = ["site", "rows compared", "rows differ", "class", *(["missing"] if with_missing else [])]
    return Table(header, rows, frozenset({1, 2, 4}), frozenset(loud))


def _line(run: Sequence[SiteResult], with_missing: bool) -> list[str]:
    name = clean(run[0].name)
    if len(run) > 1:
        name = f"{name} … {clean(run[-1].name)} ({len(run)} sites)"
    cells = [
        name,
        _span([site.rows_compared for site in run]),
        _span([site.rows_differ for site in run]),
        _class(run),
    ]
    return [*cells, _span([_missing(site) for site in run])] if with_missing else cells


def _class(run: Sequence[SiteResult]) -> str:
    if not any(site.rows_differ for site in run):
        return "equal" if run[0].rows_compared else "not compared"
    if len(run) > 1:
        return "various"
    site = run[0]
    if site.class_ is None:
        return "different bytes"
    ulp = f", {site.max_ulp:,} ULP" if site.max_ulp is not None and site.max_ulp > 1 else ""
    more = f" (in {site.rows_read} rows read)" if site.rows_read < site.rows_differ else ""
    return "; ".join(filter(None, [f"{site.class_}{ulp}{more}", tolerance.of_site(site)]))


def _missing(site: SiteResult) -> int:
    return site.missing.candidate + site.missing.parent


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"
