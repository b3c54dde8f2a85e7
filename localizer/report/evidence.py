"""Parts of a report that a diff of two captures and one within a capture have in common."""

from __future__ import annotations

from collections.abc import Iterator

from localizer.diff.result import CANDIDATE, INCONCLUSIVE, PARENT, Result
from localizer.report import patterns, sites, wording
from localizer.report.blocks import Block, Bullets, Line
from localizer.report.safe import clean


def target(result: Result) -> Iterator[Block]:
    """The first difference in a row of the target, where the first of all is a draft's."""
    row = result.rows.target
    if row is not None:
        where = f"request {clean(row.request)}, position {row.position} (step {row.step})"
        yield Line(f"first in a row of the target: {clean(row.site)}, {where}")


def patterns_and_reasons(
    result: Result, requests: str, sides: tuple[str, str] = (CANDIDATE, PARENT)
) -> Iterator[Block]:
    """The first argmax flip, signatures, histogram and reasons.

    Args:
        result: of the diff.
        requests: what the requests are called whose first differences are counted.
        sides: what the two rows of a pair are called.
    """
    yield from flip_and_signatures(result, sides)
    yield from histogram(result, requests)
    yield from reasons(result)


def flip_and_signatures(result: Result, sides: tuple[str, str] = (CANDIDATE, PARENT)) -> Iterator[Block]:
    """The first argmax flip, and patterns in where differences enter."""
    row = result.rows.amplifier
    if row is not None:
        where = f"request {clean(row.request)}, position {row.position} (step {row.step})"
        yield Line(f"first argmax flip: {where}: {wording.logits(row.logits, sides)}")
    for pattern in result.signatures:
        yield Line(f"signature: {patterns.sentence(pattern)}")


def histogram(result: Result, requests: str = "requests") -> Iterator[Block]:
    """Where the requests first differ, where that is not one place."""
    if len(result.histogram) > 1:
        yield Line(f"First differences of the {requests}", "heading")
        yield patterns.histogram(result.histogram)


def reasons(result: Result) -> Iterator[Block]:
    """What limits the verdict or stands beside it."""
    if result.reasons:
        yield Line("Reasons" if result.verdict == INCONCLUSIVE else "Beside the verdict", "heading")
        yield Bullets([f"{wording.reason(item)}." for item in result.reasons])


def sites_table(result: Result) -> Iterator[Block]:
    """The table of sites; nothing where the two are not comparable."""
    if result.sites:
        yield Line("Sites, in execution order", "heading")
        yield sites.table(result.sites)
