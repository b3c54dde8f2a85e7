"""The answer of an intervention: B against A1, with A2 as the control; did it run, was it put back?"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from localizer.diff.pipeline import diff, facts_of
from localizer.diff.record import Record
from localizer.diff.result import DIVERGED, INCONCLUSIVE, CaptureFacts, Result
from localizer.errors import LocalizerError
from localizer.store import schema
from localizer.store.interventions import Changed, Intervention, Patch, PhaseFacts
from localizer.store.phases import Phase
from localizer.store.reader import Capture
from localizer.wire.phases import AFTER, BEFORE, CHANGED, PREFIX_CACHE

SCHEMA = 1

# codes of reasons
NEVER_RAN, NOT_RESTORED, NOT_RESET = "intervention-never-ran", "not-restored", "prefix-cache-not-reset"
NOT_KNOWN, NOT_BACK = "phases-not-known", "does-not-come-back"

# why an intervention counts as never run
NOT_CALLED, COMPILED, OUTSIDE, ELSEWHERE = "not-called", "compiled", "outside-steps", "bound-elsewhere"
NOT_EMPTY, NOT_WARM = "cache-not-empty", "cache-not-warm"

STOPPING = (NEVER_RAN, NOT_RESTORED, NOT_RESET, NOT_KNOWN)
"""Reasons that make the answer inconclusive; the others stand beside the verdict."""


class Limit(Record, frozen=True, kw_only=True):
    """Something that limits the answer; its sentence is made in `report/`.

    Attributes:
        code: `NEVER_RAN` and the others.
        detail: of `NEVER_RAN`, why: `NOT_CALLED` and the others; else empty.
        target: what was changed, or the phase concerned (untrusted).
        worker: number of the worker; None for all.
        places: where else the original was bound (untrusted).
        count: calls outside of steps.
    """

    code: str
    detail: str = ""
    target: str = ""
    worker: int | None = None
    places: list[str] = msgspec.field(default_factory=list)
    count: int = 0


class PhaseSummary(Record, frozen=True, kw_only=True):
    """A phase as it went.

    Attributes:
        name: "A1", "B", "A2", or "warm-up".
        first_round, rounds: its rounds in the capture.
        requests: those that returned.
        cached_tokens: prompt tokens that all of them took from the prefix cache.
        cached_first: of its first round, those of each request.
        reset: what vLLM answered when the prefix cache was reset before it; None where that was not asked.
        tries: how often that was asked.
    """

    name: str
    first_round: int
    rounds: int
    requests: int
    cached_tokens: int
    cached_first: list[int]
    reset: bool | None
    tries: int


class Intervened(Record, frozen=True, kw_only=True):
    """The whole answer.

    Attributes:
        verdict: of `changed`, or "inconclusive" where one of `reasons` is in `STOPPING`.
        kind: "patch", "prefix-cache" or "attention-backend".
        compiled: whether the engine compiled the model; None where that is not known.
        workers: what was changed in each worker, and how often that ran.
        changed: B against A1, with A2 as the control.
        restored: A2 against A1.
    """

    schema: int = SCHEMA
    verdict: str
    kind: str
    reasons: list[Limit]
    capture: CaptureFacts
    phases: list[PhaseSummary]
    patches: list[Patch]
    everywhere: bool
    compiled: bool | None
    workers: list[list[Changed]]
    changed: Result
    restored: Result


def judge(capture: Capture) -> Intervened:
    """Compare the phases of a capture.

    Raises:
        LocalizerError: it has none.
        DamagedCapture: it is not what its records say.
    """
    asked = capture.open.intervention
    if asked is None:
        raise LocalizerError(f"{capture.folder} has no phases; make a capture with localize intervene.")
    before, after = Phase(capture, BEFORE), Phase(capture, AFTER)
    changed = diff(Phase(capture, CHANGED), before, [after])
    restored = diff(after, before)
    phases = summaries(capture, asked)
    limits = list(_limits(capture, asked, phases))
    if restored.verdict == DIVERGED:
        limits.append(Limit(code=NOT_BACK))
    stopped = any(limit.code in STOPPING for limit in limits)
    course = capture.manifest.intervention if capture.manifest is not None else None
    return Intervened(
        verdict=INCONCLUSIVE if stopped else changed.verdict,
        kind=asked.kind,
        reasons=limits,
        capture=facts_of(capture),
        phases=phases,
        patches=asked.patches,
        everywhere=asked.everywhere,
        compiled=_compiled(capture),
        workers=[] if course is None else course.workers,
        changed=changed,
        restored=restored,
    )


def summaries(capture: Capture, asked: Intervention) -> list[PhaseSummary]:
    """The phases of a capture, in order; of those that were not begun nothing but the names is known."""
    manifest, each = capture.manifest, len(capture.open.workload.matrix) * asked.repeats
    course = manifest.intervention if manifest is not None else None
    told = {facts.name: facts for facts in course.phases} if course is not None else {}
    found = []
    for number, name in enumerate(asked.phases):
        phase = Phase(capture, name)
        outputs = phase.manifest.outputs if phase.manifest is not None else []
        facts = told.get(name, PhaseFacts(name=name, reset=None, tries=0))
        first = set(schema.rounds(phase.open.workload.matrix, 1)[0])
        found.append(
            PhaseSummary(
                name=name,
                first_round=number * each,
                rounds=each,
                requests=len(outputs),
                cached_tokens=sum(output.cached_tokens for output in outputs),
                cached_first=[output.cached_tokens for output in outputs if output.request in first],
                reset=facts.reset,
                tries=facts.tries,
            )
        )
    return found


def _limits(capture: Capture, asked: Intervention, phases: list[PhaseSummary]) -> Iterator[Limit]:
    """What keeps the answer from being one."""
    course = capture.manifest.intervention if capture.manifest is not None else None
    if course is None:
        yield Limit(code=NOT_KNOWN)
        return
    for phase in phases:
        if phase.reset is False:
            yield Limit(code=NOT_RESET, target=phase.name, count=phase.tries)
    if asked.kind == PREFIX_CACHE:
        yield from _of_the_cache({phase.name: phase for phase in phases})
        return
    if not course.workers or not all(course.workers):
        yield Limit(code=NOT_KNOWN)
    for worker, changes in enumerate(course.workers):
        for change in changes:
            yield from _of_a_change(change, worker, _compiled(capture) is True)


def _of_the_cache(phases: dict[str, PhaseSummary]) -> Iterator[Limit]:
    """Whether B began with an empty prefix cache, and A1 and A2 with one that held their prompts."""
    if any(phases[CHANGED].cached_first):
        yield Limit(code=NEVER_RAN, detail=NOT_EMPTY, target=CHANGED)
    for name in (BEFORE, AFTER):
        if not any(phases[name].cached_first):
            yield Limit(code=NEVER_RAN, detail=NOT_WARM, target=name)


def _of_a_change(change: Changed, worker: int, compiled: bool) -> Iterator[Limit]:
    """Whether a change ran in a worker, everywhere, and was put back."""
    if change.elsewhere and not change.rebound:
        yield Limit(
            code=NEVER_RAN, detail=ELSEWHERE, target=change.target, worker=worker, places=change.elsewhere
        )
    if not change.in_steps:
        detail = OUTSIDE if change.outside else COMPILED if compiled else NOT_CALLED
        yield Limit(code=NEVER_RAN, detail=detail, target=change.target, worker=worker, count=change.outside)
    if not change.restored:
        yield Limit(code=NOT_RESTORED, target=change.target, worker=worker)


def _compiled(capture: Capture) -> bool | None:
    """Whether the engine compiled the model, as it resolved its configuration."""
    mode = capture.manifest.engine.get("compilation_mode") if capture.manifest is not None else None
    return mode != "NONE" if isinstance(mode, str) and mode else None
