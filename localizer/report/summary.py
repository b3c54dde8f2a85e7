"""The answer in one sentence: what was equal, what differs, where, how, and what a control shows."""

from __future__ import annotations

from collections.abc import Sequence

from localizer.diff import localize
from localizer.diff.elements import (
    DTYPE,
    K_ULP,
    NAN_PAYLOAD,
    NON_FINITE,
    ONE_ULP,
    SHAPE,
    SIGNED_ZERO,
    VALUE,
)
from localizer.diff.places import Place, place
from localizer.diff.result import Result, Summary
from localizer.diff.summary import DIFFERENT_INPUTS, IDENTICAL_INPUTS
from localizer.report import tolerance, wording
from localizer.report.counts import count
from localizer.report.safe import clean

RUNS_SHOWN = 4
"""Runs of neighbouring heads that are named; more are counted."""

CONTROL = {"candidate-only": "not in the control", "also-in-control": "also in the control"}
"""What a control says, by the result's attribution; nothing without one."""

_DRAFT = "draft's "

_OPS = {
    localize.IN_ATTENTION: "attention",
    localize.IN_ROUTER: "router",
    localize.IN_EXPERTS: "experts",
    localize.IN_STATE_SPACE: "state-space op",
}


def sentence(result: Result) -> str:
    """The sentence, without a full stop; empty where no site differs."""
    found = result.summary
    if found is None:
        return ""
    where = [_what(found), f"request {clean(found.request)}", f"position {found.position}"]
    if place(found.site).draft:
        where.append(clean(found.kind.replace("draft-", "draft step ")))
    where.append(_heads(found))
    how = ", ".join(filter(None, [_how(found), tolerance.mark(result, found.site, found.within_tolerance)]))
    return "; ".join(filter(None, [", ".join(filter(None, where)), how, CONTROL.get(found.control, "")]))


def _what(found: Summary) -> str:
    """What was equal, what was not, and what lies between."""
    before = place(found.site)
    if found.blame == localize.WRONG_INPUTS:
        return f"different inputs: {_site(before)}"
    if found.after is None:
        return f"different {_site(before)}, nothing compared upstream of it"
    if found.blame in _OPS:
        inputs = {IDENTICAL_INPUTS: "identical inputs", DIFFERENT_INPUTS: "different KV rows as inputs"}
        equal = inputs.get(found.inputs, "inputs equal as far as compared")
        return f"{equal}, different output: {_OPS[found.blame]} of {wording.layer(before)}"
    equal = f"identical {_site(place(found.after))}, different {_site(before)}"
    names = {localize.IN_LM_HEAD: "lm_head", localize.IN_SAMPLER: "sampler"}
    return f"{equal}: {names.get(found.blame, 'the code between')}"


def _site(where: Place) -> str:
    text = wording.site(where).removeprefix("the ")
    return f"{text.removeprefix(_DRAFT)} of the draft" if text.startswith(_DRAFT) else text


def _heads(found: Summary) -> str:
    """`head 2`, `heads 0–3 of 9`; empty for rows without heads, or with one."""
    if not found.heads or found.heads_differ is None or found.heads_compared in (None, 1):
        return ""
    if found.heads_differ == found.heads_compared:
        return f"all {found.heads_compared:,} heads"
    if len(found.heads) == 1:
        return f"head {found.heads[0]}"
    runs = _runs(found.heads)
    if len(runs) > RUNS_SHOWN or found.heads_differ > len(found.heads):
        return f"{found.heads_differ:,} of {found.heads_compared:,} heads, the first {found.heads[0]}"
    shown = ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in runs)
    return f"heads {shown} of {found.heads_compared:,}"


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def _how(found: Summary) -> str:
    """`1 ULP in 3 of 64 elements`; of the one head that differs, if only one does."""
    if found.class_ in (DTYPE, SHAPE):
        return f"of another {found.class_}"
    if found.class_ is None or found.elements_differ is None or found.elements is None:
        return "other bytes, of which only digests were kept"
    elements = found.elements
    if found.heads and found.heads_differ == 1 and found.heads_compared:
        elements //= found.heads_compared
    kinds = {
        SIGNED_ZERO: "the sign of zero",
        NAN_PAYLOAD: "the bytes of NaN",
        ONE_ULP: "1 ULP",
        K_ULP: f"up to {found.max_ulp} ULP",
        VALUE: "other values",
        NON_FINITE: "NaN or infinity on one side",
    }
    return f"{kinds[found.class_]} in {found.elements_differ:,} of {count(elements, 'element')}"
