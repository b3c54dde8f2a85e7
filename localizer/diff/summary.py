"""The answer in one sentence, as data: what was equal, what differs, where and how."""

from __future__ import annotations

from localizer.diff.localize import (
    DRAFT_ENTRY,
    IN_ATTENTION,
    IN_EXPERTS,
    IN_LM_HEAD,
    IN_ROUTER,
    IN_SAMPLER,
    IN_STATE_SPACE,
    WRONG_INPUTS,
)
from localizer.diff.places import INPUTS as INPUT_SITES
from localizer.diff.places import QKV, place
from localizer.diff.result import Finding, Summary

IDENTICAL_INPUTS, DIFFERENT_INPUTS, PARTLY_COMPARED, NOT_COMPARED = KNOWN_INPUTS = (
    "identical", "different", "partly-compared", "not-compared",
)  # fmt: skip
"""What is known of the inputs of the segment."""

WHOLE_INPUTS = (
    *(IN_ATTENTION, IN_EXPERTS, IN_ROUTER, IN_STATE_SPACE),
    *(IN_LM_HEAD, IN_SAMPLER, DRAFT_ENTRY),
)
"""Segments all of whose inputs are sites."""


def summarize(first: Finding | None, attribution: str) -> Summary | None:
    """The summary of the first difference, with what a control says of it; None if no site differs."""
    if first is None:
        return None
    return Summary(
        inputs=_inputs(first),
        blame=first.blame,
        after=first.segment.after,
        site=first.site,
        layer=place(first.site).number,
        request=first.request,
        position=first.position,
        kind=first.kind,
        heads=None if first.heads is None else [item.head for item in first.heads],
        heads_differ=first.heads_differ,
        heads_compared=first.heads_compared,
        class_=first.class_,
        elements_differ=first.elements_differ,
        elements=first.elements,
        max_ulp=first.max_ulp,
        within_tolerance=first.within_tolerance,
        control=attribution,
    )


def _inputs(first: Finding) -> str:
    """What is known of the inputs: of an op, of lm_head and of the sampler all of them can be.

    What a layer's code takes in beside the site before it, the residual stream, is no site.
    """
    if first.blame == WRONG_INPUTS:
        return DIFFERENT_INPUTS
    if first.segment.after is None:
        return NOT_COMPARED
    read, fed = first.key_value, first.fed_by
    if (read is not None and read.differ) or (fed is not None and fed.differ):
        return DIFFERENT_INPUTS
    whole = first.blame in WHOLE_INPUTS or (
        place(first.segment.after).stage == INPUT_SITES and place(first.site).stage == QKV
    )
    inside = first.unobserved
    unknown = inside.layers or inside.sites or inside.later_layers or (read is not None and read.not_compared)
    if fed is not None:
        unknown = unknown or fed.not_compared or not fed.equal
    return IDENTICAL_INPUTS if whole and not unknown else PARTLY_COMPARED
