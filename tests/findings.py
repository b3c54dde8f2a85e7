"""A finding as data, to be told in words."""

from __future__ import annotations

import msgspec

from localizer.diff.localize import blame_of
from localizer.diff.places import place
from localizer.diff.result import Both, Finding, Segment, Unobserved, Value


def finding(after: str | None, before: str, **more: object) -> Finding:
    found = Finding(
        request="r00.00",
        position=5,
        kind="decode",
        step=3,
        site=before,
        segment=Segment(after=after, before=before),
        blame=blame_of(None if after is None else place(after), place(before)),
        class_="1-ulp",
        elements_differ=3,
        elements=576,
        first_element=[2, 17],
        max_ulp=1,
        max_abs=0.0078125,
        max_rel=0.0078125,
        cosine=1.0,
        values=Both(
            candidate=Value(hex="0x3f81", decimal="1.0078125"), parent=Value(hex="0x3f80", decimal="1.0")
        ),
        logits=None,
        key_value=None,
        fed_by=None,
        unobserved=Unobserved(),
        heads=None,
        heads_differ=None,
        heads_compared=None,
        within_tolerance=None,
        parent_request="r00.00",
        parent_step=3,
    )
    return msgspec.structs.replace(found, **more)
