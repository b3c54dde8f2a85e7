"""Where two captures were scheduled differently: the steps, the forwards, and what chose the kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from localizer.diff.result import Difference
from localizer.store.reader import Capture
from localizer.store.trace import NAME, StepTrace

MOST_BYTES = 16 << 20
"""Traces longer than this, on one side, are not compared: a diff is to be quick."""

ASKED = ("requests", "scheduled", "computed", "cached", "drafts", "resumed")
"""What the scheduler asked for in a step."""

_NONE = object()


def differences(candidate: Capture, parent: Capture) -> Iterator[Difference]:
    """Every part of the schedule that is not the same, by dotted name; nothing where a side has no trace.

    Request by request only for equal workloads; steps pair by their number.
    """
    if max(map(_size, (candidate, parent))) > MOST_BYTES or not (candidate.steps and parent.steps):
        return
    ours, theirs = candidate.steps, parent.steps
    if len(ours) != len(theirs):
        yield Difference(setting="schedule.steps", candidate=len(ours), parent=len(theirs))
    other = next(
        (number for number, pair in enumerate(zip(ours, theirs, strict=False)) if _asked(*pair)), None
    )
    if other is not None:
        yield _first("schedule.first difference", ours, theirs, other, _in_words)
    both = min(len(ours), len(theirs))
    counts = [dict(Counter(trace.graph for trace in steps[:both])) for steps in (ours, theirs)]
    if counts[0] != counts[1]:
        yield Difference(setting="schedule.graph modes", candidate=counts[0], parent=counts[1])
    same = both if other is None else other
    for name, what in (("padded rows", _padding), ("block tables", _blocks), ("slots", _slots)):
        at = next((number for number in range(same) if what(ours[number]) != what(theirs[number])), None)
        if at is not None:
            yield _first(f"schedule.{name}", ours, theirs, at, what)
    yield from _backend(ours[:same], theirs[:same])


def _size(capture: Capture) -> int:
    return sum(file.size for file in capture.files if NAME.fullmatch(file.name))


def _asked(one: StepTrace, other: StepTrace) -> bool:
    return any(getattr(one, name) != getattr(other, name) for name in ASKED)


def _in_words(trace: StepTrace) -> str:
    return f"{len(trace.requests)} requests, {sum(trace.scheduled)} tokens"


def _padding(trace: StepTrace) -> int:
    return trace.padded - sum(trace.scheduled)


def _blocks(trace: StepTrace) -> Sequence[str] | None:
    return trace.blocks


def _slots(trace: StepTrace) -> Sequence[str] | None:
    return trace.slots


def _first(
    name: str, ours: Sequence[StepTrace], theirs: Sequence[StepTrace], at: int, what: Any
) -> Difference:
    """A difference that is told of the first step that shows it; of digests only that they differ."""
    values = [what(steps[at]) for steps in (ours, theirs)]
    if isinstance(values[0], list) or isinstance(values[1], list):
        values = [None if value is None else value[:1] for value in values]
    told = [None if value is None else f"step {at}: {value}" for value in values]
    return Difference(setting=name, candidate=told[0], parent=told[1])


def _backend(ours: Sequence[StepTrace], theirs: Sequence[StepTrace]) -> Iterator[Difference]:
    """The scalars by which an attention backend chooses its kernels, each at the first step that differs."""
    found: dict[str, Difference] = {}
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one.backend == other.backend:
            continue
        for name in one.backend.keys() | other.backend.keys():
            values = one.backend.get(name, _NONE), other.backend.get(name, _NONE)
            if values[0] != values[1] and name not in found:
                told = [None if value is _NONE else f"step {number}: {value}" for value in values]
                setting = f"schedule.backend.{name}"
                found[name] = Difference(setting=setting, candidate=told[0], parent=told[1])
    yield from (found[name] for name in sorted(found))
