"""What a page and a picture say first: which captures, and the numbers to be seen before all others."""

from __future__ import annotations

from collections.abc import Iterator

from localizer.diff.result import DIVERGED, Result
from localizer.report import summary, within
from localizer.report.safe import clean


def captures(result: Result) -> str:
    """What is compared with what."""
    both = result.captures
    if within.is_within(result):
        return f"{clean(both.candidate.label)} compared with itself"
    return f"{clean(both.candidate.label)} compared with {clean(both.parent.label)}"


def facts(result: Result) -> Iterator[tuple[str, str]]:
    """The numbers, each with its name, and what a control says."""
    pairs, tokens = result.coverage.pairs, result.tokens
    yield "row × site pairs that differ", f"{pairs.differ:,} of {pairs.compared:,} compared"
    yield "requests with other tokens", f"{tokens.requests_differ:,} of {tokens.requests:,}"
    if not within.is_within(result):
        yield "other settings that differ", f"{len(result.differences):,}"
        if result.verdict == DIVERGED:
            yield "change or noise?", summary.CONTROL.get(result.attribution, "not known: no control tells")
