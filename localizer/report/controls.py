"""What the controls say: does the parent differ from itself where the candidate differs from it?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from localizer.diff import attribution as codes
from localizer.diff.attribution import ControlFacts, ControlPlace, Unfit
from localizer.diff.result import DIVERGED, Result
from localizer.report.blocks import Block, Bullets, Line, Table
from localizer.report.counts import count
from localizer.report.safe import clean

SITES_SHOWN = 12
"""Sites that get a line; the JSON result has all."""

WIDEST_VALUE = 60
"""Characters of a setting's value that are shown."""

_LEADS = {
    codes.CANDIDATE_ONLY: "not in the control",
    codes.ALSO_IN_CONTROL: "also in the control (the parent differs from itself {where})",
    codes.NO_CONTROL: "no attribution",
}

_AT_ROW = {
    codes.EQUAL: "has equal bytes there",
    codes.DIFFERS: "differs there",
    codes.OTHER_TOKENS: "returned other tokens for that request before it",
    codes.NO_SITE: "does not hold that site",
    codes.NO_ROW: "has no counterpart of that row",
    codes.NOT_RECORDED: "did not record that row at that site, or the parent did not",
}

_AT_TOKEN = _AT_ROW | {
    codes.EQUAL: "returned the same tokens up to there",
    codes.DIFFERS: "returned another token there",
    codes.NO_ROW: "did not return that token",
}

_UNFIT = {
    codes.INCOMPLETE_CONTROL: "is incomplete",
    codes.ANOTHER_SOURCE: "ran another source",
    codes.ANOTHER_WORKLOAD: "ran another workload",
    codes.OTHER_SETTINGS: "ran under other settings",
    codes.OTHER_MACHINE: "ran on another machine",
}


def line(result: Result) -> Iterator[Block]:
    """Whether the first difference is also in a control; nothing without controls."""
    if result.controls is None:
        return
    controls = result.controls.captures
    if all(control.at_first == codes.NO_PLACE for control in controls):
        yield Line("control: nothing to attribute, since no compared row and no token differs")
        return
    lead = f"control: {_LEADS[result.attribution].format(where=_where(result))}"
    told = [f"{clean(control.label)} {_told(control, result)}" for control in controls]
    if len(told) == 1:
        yield Line(f"{lead}: {told[0]}")
    else:
        yield Line(lead)
        yield Bullets(told)


def blocks(result: Result) -> Iterator[Block]:
    """The controls against the parent, and where they differ."""
    if result.controls is None:
        return
    controls = result.controls
    yield Line("Controls, against the parent", "heading")
    header = ["capture", "state", "verdict", "pairs compared", "differ", "requests differ"]
    rows = [
        [
            *(clean(it.label), it.state, it.verdict, f"{it.compared:,}", f"{it.differ:,}"),
            f"{it.requests_differ:,} of {it.requests:,}",
        ]
        for it in controls.captures
    ]
    yield Table(header, rows, frozenset({3, 4, 5}))
    yield Bullets(list(_notes(result)))
    if controls.sites:
        yield Line("Row pairs that differ from the parent", "heading")
        header = ["site", "candidate only", "both", "control only", "not covered"]
        cells = [
            [clean(it.site), *map(str, (it.candidate_only, it.both, it.control_only, it.not_covered))]
            for it in controls.sites[:SITES_SHOWN]
        ]
        yield Table(header, cells, frozenset({1, 2, 3, 4}))
        if len(controls.sites) > SITES_SHOWN:
            yield Line(f"  … and {len(controls.sites) - SITES_SHOWN} more; --format json lists all")


def _notes(result: Result) -> Iterator[str]:
    assert result.controls is not None
    for control in result.controls.captures:
        if control.unfit and control.at_first != codes.NO_PLACE:
            yield f"{clean(control.label)}, which does not count, {_shown(control, result)}"
        if control.first is not None:
            yield f"{clean(control.label)} first differs from the parent at {place(control.first)}"
        elif control.compared and not control.unfit:
            yield f"{clean(control.label)} equals the parent wherever both were compared"
    requests = result.controls.requests
    if len(requests) > 1:
        numbers = Counter(request.attribution for request in requests)
        yield (
            f"first differences of {count(len(requests), 'request')}: "
            f"{numbers[codes.CANDIDATE_ONLY]:,} not in a control, "
            f"{numbers[codes.ALSO_IN_CONTROL]:,} also in one, "
            f"{numbers[codes.NO_CONTROL]:,} without attribution"
        )


def establishes(result: Result) -> list[str]:
    """What the controls show."""
    if result.controls is None or result.attribution == codes.NO_CONTROL:
        return []
    counting = [control for control in result.controls.captures if not control.unfit]
    if result.attribution == codes.CANDIDATE_ONLY:
        labels = _labels([it for it in counting if it.at_first == codes.EQUAL])
        what = "at that row and site" if result.first is not None else "in the tokens up to that one"
        return [f"The parent repeated itself {what}, in {labels}."]
    differing = (codes.DIFFERS, codes.UPSTREAM, codes.OTHER_TOKENS)
    labels = _labels([it for it in counting if it.at_first in differing])
    return [f"The parent differs from itself {_where(result)} without any change, in {labels}."]


def open_questions(result: Result) -> list[str]:
    """What the controls leave open."""
    if result.verdict != DIVERGED:
        return []
    question = "Whether the change or noise is the cause"
    if result.controls is None:
        return [f"{question}: the parent was not compared with itself (no control)."]
    if result.attribution == codes.NO_CONTROL:
        return [f"{question}: no control attributes the first difference."]
    if result.attribution == codes.ALSO_IN_CONTROL:
        return ["That the change has no effect of its own: the parent's noise may hide it."]
    number = sum(not it.unfit and it.at_first == codes.EQUAL for it in result.controls.captures)
    samples = "one control is one sample" if number == 1 else f"{number} controls are {number} samples"
    said = [f"That the parent always repeats itself there: {samples}."]
    elsewhere = max((it.differ for it in result.controls.captures if not it.unfit), default=0)
    if elsewhere:
        pairs = count(elsewhere, "row × site pair")
        said.append(f"That the parent repeats itself elsewhere: a control differs from it at {pairs}.")
    return said


def place(where: ControlPlace) -> str:
    """Where a control differs from the parent."""
    row = f"request {clean(where.request)}, position {where.position} (step {where.step})"
    return f"{clean(where.site)}, {row}"


def unfit(item: Unfit) -> str:
    """Why a control attributes nothing, as what it did."""
    what = _UNFIT[item.code]
    if item.code == codes.INCOMPLETE_CONTROL:
        return f"{what}: {clean(item.detail).rstrip('.')}"
    if not item.detail:
        return what
    values = (
        "none" if value is None else clean(str(value), WIDEST_VALUE) for value in (item.control, item.parent)
    )
    return f"{what} ({clean(item.detail)}: {next(values)}, the parent's {next(values)})"


def _told(control: ControlFacts, result: Result) -> str:
    if not control.unfit:
        return _shown(control, result)
    return f"does not count, since it {' and '.join(unfit(item) for item in control.unfit)}"


def _shown(control: ControlFacts, result: Result) -> str:
    if control.at_first == codes.UPSTREAM and control.upstream is not None:
        return f"differs upstream of it, first at {place(control.upstream)}"
    return (_AT_TOKEN if result.first is None else _AT_ROW)[control.at_first]


def _where(result: Result) -> str:
    """`there`, or `upstream of it` where no control differs at the place itself."""
    assert result.controls is not None
    there = any(not it.unfit and it.at_first == codes.DIFFERS for it in result.controls.captures)
    return "there" if there else "upstream of it"


def _labels(controls: list[ControlFacts]) -> str:
    return " and ".join(clean(control.label) for control in controls)
