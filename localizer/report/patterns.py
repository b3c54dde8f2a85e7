"""Signatures in words, and the histogram of first differences."""

from __future__ import annotations

from collections.abc import Sequence

from localizer.diff.result import FirstAt, Signature
from localizer.report.blocks import Table
from localizer.report.counts import count
from localizer.report.safe import clean

SHOWN = 10
"""Places that the histogram shows; the JSON result has more."""

WIDTH = 24
"""Characters of the longest bar."""

_ROWS = {
    "last-token": "only rows that feed the logits",
    "from-position-1": "every request from position 1 on",
    "after-chunk-boundary": "only prompt rows behind a chunk boundary",
    "cached-prefix": "only requests whose prompt begins in the prefix cache",
    "decode-only": "only decode rows",
    "prefill-only": "only prompt rows",
    "verify-only": "only rows of a verification",
    "padded-batch": "only rows of padded batches",
}


def sentence(pattern: Signature) -> str:
    """A pattern in one sentence, without a full stop: what it is, and the rows that speak for it."""
    if pattern.code == "draft-only":
        return "only sites of the draft differ"
    if pattern.code == "sampler-only":
        return "only sampled tokens differ: logits are equal wherever they were compared"
    if pattern.code == "grows":
        return f"the relative error grows {pattern.number:,} times over the layers that follow"
    if pattern.code == "decays":
        if not pattern.number:
            return "the difference is gone again at the last layer"
        return f"the relative error decays to 1/{pattern.number:,} over the layers that follow"
    if pattern.code == "heads":
        which = "head" if len(pattern.heads) == 1 else "heads"
        names = ", ".join(map(str, pattern.heads))
        return f"only {which} {names} of {pattern.number}, in all {pattern.rows:,} first differing rows read"
    if pattern.code == "one-rank":
        return (
            f"only rank {pattern.number} differs where the difference enters, other ranks are equal there, "
            f"in all {pattern.rows:,} first differing rows of that layer"
        )
    if pattern.code == "batch-size-over":
        what = f"only batches of more than {count(pattern.number or 0, 'request')}"
    else:
        what = _ROWS.get(pattern.code, clean(pattern.code))
    equal = (
        "1 equal row is not" if pattern.equal_rows == 1 else f"none of {pattern.equal_rows:,} equal rows is"
    )
    return f"{what}: all {pattern.rows:,} first differing rows are such, {equal}"


def histogram(bars: Sequence[FirstAt]) -> Table:
    """Where the requests differ first, the most frequent place first, each with a bar."""
    longest = max(bar.requests for bar in bars)
    rows = [
        [
            clean(bar.site),
            str(bar.position),
            f"{bar.requests:,}",
            "#" * max(1, WIDTH * bar.requests // longest),
        ]
        for bar in bars[:SHOWN]
    ]
    if len(bars) > SHOWN:
        rest = sum(bar.requests for bar in bars[SHOWN:])
        rows.append([f"… {count(len(bars) - SHOWN, 'more place')}", "", f"{rest:,}", ""])
    return Table(["site", "position", "requests", ""], rows, frozenset({1, 2}), bar=3)
