"""Which heads of a row of shape [heads, head_dim] differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localizer.diff.elements import Elements, greatest_ulp, worst_class
from localizer.diff.result import Head

LISTED = 256
"""Differing heads of a row that are listed; all are counted."""


def differing_heads(found: Elements, shape: Sequence[int]) -> tuple[list[Head] | None, int | None]:
    """The first differing heads of a row of `shape`, and how many differ; (None, None) for a flat row."""
    if len(shape) != 2:
        return None, None
    heads, starts = np.unique(found.where // shape[1], return_index=True)
    ends = [*starts[1:], len(found.where)]
    listed = []
    for head, start, end in list(zip(heads, starts, ends, strict=True))[:LISTED]:
        mine = slice(int(start), int(end))
        listed.append(
            Head(
                head=int(head),
                class_=worst_class(found, mine),
                elements_differ=int(end - start),
                max_ulp=greatest_ulp(found, mine),
            )
        )
    return listed, len(heads)
