"""The table of differing rows of the site at which the first difference was found."""

from __future__ import annotations

from collections.abc import Iterator

from localizer.diff.result import Result, RowDifference
from localizer.report.blocks import MISSING, Block, Line, Table
from localizer.report.safe import clean
from localizer.report.tolerance import WITHIN

SHOWN = 8
"""Rows that are listed; the JSON result has more."""


def blocks(result: Result) -> Iterator[Block]:
    """Heading and table; nothing where the site has one such row, which is told above."""
    if result.first is None or len(result.first_rows) < 2:
        return
    differ = next((site.rows_differ for site in result.sites if site.name == result.first.site), 0)
    shown = result.first_rows[:SHOWN]
    which = f"the first {len(shown)} of {differ:,} in causal order" if len(shown) < differ else "all"
    yield Line(f"Rows that differ at {clean(result.first.site)}: {which}", "heading")
    judged = any(row.within_tolerance is not None for row in shown)
    header = ["request", "position", "kind", "class", "elements", "max ULP", "max abs", "cosine"]
    rows = [_cells(row, judged) for row in shown]
    yield Table([*header, *(["tolerance"] if judged else [])], rows, frozenset({1, 4, 5, 6, 7}))


def _cells(row: RowDifference, judged: bool) -> list[str]:
    return [
        clean(row.request),
        str(row.position),
        clean(row.kind),
        row.class_,
        MISSING if row.elements_differ is None else f"{row.elements_differ:,}",
        MISSING if row.max_ulp is None else f"{row.max_ulp:,}",
        MISSING if row.max_abs is None else f"{row.max_abs:.3g}",
        MISSING if row.cosine is None else f"{row.cosine:.6f}",
        *([WITHIN[row.within_tolerance]] if judged else []),
    ]
