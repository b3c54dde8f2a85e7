"""The answer of an intervention, as text and as JSON (docs/result.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

import msgspec

from localizer.diff.attribution import ALSO_IN_CONTROL
from localizer.diff.intervention import STOPPING, Intervened, PhaseSummary
from localizer.diff.result import DIVERGED, IDENTICAL
from localizer.report import controls, text, wording
from localizer.report import json as as_json
from localizer.report import scope as scope_of
from localizer.report.blocks import Block, Bullets, Line, Table
from localizer.report.counts import count
from localizer.report.limits import sentence
from localizer.report.safe import clean
from localizer.report.scope import Scope
from localizer.store.interventions import Changed
from localizer.wire.phases import AFTER, ATTENTION_BACKEND, BEFORE, CHANGED, PATCH, PREFIX_CACHE, WARM_UP

_WHAT = {
    PATCH: {BEFORE: "as it is", CHANGED: "patched", AFTER: "restored"},
    PREFIX_CACHE: {
        **{WARM_UP: "fills the prefix cache", BEFORE: "warm prefix cache"},
        **{CHANGED: "empty prefix cache at its start", AFTER: "warm prefix cache"},
    },
    ATTENTION_BACKEND: {BEFORE: "as it is", CHANGED: "new metadata builders", AFTER: "those of before"},
}

_LATER = {
    PATCH: "What a process does that starts with the change: here it came after loading and warm-up.",
    PREFIX_CACHE: "What a process does that starts without prefix caching.",
    ATTENTION_BACKEND: "What a process does whose builders are made with its KV cache, before warm-up.",
}


def render(style: str, answer: Intervened, stream: TextIO) -> None:
    """Write the answer as "text" or "json"."""
    if style == "json":
        as_json.write(tree(answer), stream)
    else:
        text.write(document(answer), stream)


def tree(answer: Intervened) -> dict[str, Any]:
    """The answer as plain objects: reasons with their sentences, two diffs as `localize diff` prints them."""
    plain: dict[str, Any] = msgspec.to_builtins(
        msgspec.structs.replace(answer, changed=None, restored=None)  # as_json makes these
    )
    for reason, limit in zip(plain["reasons"], answer.reasons, strict=True):
        reason["text"] = sentence(limit)
    return plain | {
        "changed": as_json.tree(answer.changed),
        "restored": as_json.tree(answer.restored),
        "scope": msgspec.to_builtins(scope(answer)),
    }


def document(answer: Intervened) -> Iterator[Block]:
    """The report as blocks, top to bottom."""
    stopping = [limit for limit in answer.reasons if limit.code in STOPPING]
    found = wording.headline(answer.changed)
    yield Line(f"inconclusive: {sentence(stopping[0])}" if stopping else found, "verdict")
    if stopping:
        yield Line(f"what the phases show all the same: {found}")
    yield Line(_comes_back(answer))
    yield Bullets(list(_changes(answer)))
    if answer.reasons:
        yield Line("Reasons" if stopping else "Beside the verdict", "heading")
        yield Bullets([f"{sentence(limit)}." for limit in answer.reasons])
    yield Line("Phases, in one process on one engine", "heading")
    yield _phases(answer)
    yield Line(f"{_named(answer, CHANGED)}, against {_named(answer, BEFORE)}", "heading")
    yield Line("B is called the candidate here, A1 the parent, and A2 is the control.")
    yield from text.answer(answer.changed)
    yield from text.differing(answer.changed.differences)
    yield from text.body(answer.changed)
    yield Line(f"{_named(answer, AFTER)}, against {_named(answer, BEFORE)}", "heading")
    yield Line(wording.headline(answer.restored))
    yield Line(f"tokens: {wording.tokens(answer.restored.tokens)}")
    yield from text.limits(scope(answer))


def scope(answer: Intervened) -> Scope:
    """What the answer establishes and what not: that of B against A1, and what the phases add."""
    establishes, leaves = scope_of.establishes(answer.changed), [_LATER[answer.kind]]
    calls = [change for worker in answer.workers for change in worker]
    if calls and all(change.in_steps and change.restored for change in calls):
        establishes.append("What was changed ran in B's steps, and the original was in place before A2.")
    if answer.restored.verdict == IDENTICAL:
        establishes.append("A2 equals A1 wherever both were compared.")
    elif answer.changed.attribution == ALSO_IN_CONTROL:
        establishes.append("A2 differs from A1 there too, or upstream of it: noise, or what B left behind.")
    if answer.kind == PATCH:
        if answer.compiled is not False:
            leaves.append(
                "What compiled code does: a function that was traced into it is not reached by a patch."
            )
        leaves.append(
            "That the original was called nowhere in B: closures and registered operators may hold it unseen."
        )
    leaves.append("What other processes do: all phases ran in one.")
    leaves += controls.open_questions(answer.changed)
    return Scope(
        establishes=establishes, does_not_establish=[*leaves, *scope_of.does_not_establish(answer.changed)]
    )


def _comes_back(answer: Intervened) -> str:
    """Whether A2 equals A1."""
    if answer.restored.verdict == IDENTICAL:
        stopped = any(limit.code in STOPPING for limit in answer.reasons)
        return f"A2 equals A1{'' if stopped else ': the process came back to what it did before the change'}."
    if answer.restored.verdict == DIVERGED:
        return (
            f"A2 DIFFERS from A1 ({wording.headline(answer.restored)}): the process does not come back; "
            "the change left something behind, or this is noise."
        )
    return "Whether A2 equals A1 is not known."


def _changes(answer: Intervened) -> Iterator[str]:
    """What was changed, by what, and how often that ran."""
    patches = {patch.target: patch for patch in answer.patches}
    for target, patch in patches.items():
        yield (
            f"{clean(target)} was replaced by {clean(patch.name)} of {clean(patch.path)} "
            f"(xxh3-128 {clean(patch.xxh3_128)}){' everywhere' if answer.everywhere else ''}"
        )
    for number, worker in enumerate(answer.workers):
        where = f"worker {number}: " if len(answer.workers) > 1 else ""
        yield from (f"{where}{_ran(change)}" for change in worker)


def _ran(change: Changed) -> str:
    more = f" ({clean(change.detail)})" if change.detail else ""
    rebound = (
        f", as were {', '.join(map(clean, change.elsewhere))}" if change.elsewhere and change.rebound else ""
    )
    return (
        f"{clean(change.target)}{more} ran {count(change.in_steps, 'time')} in B's steps, "
        f"{change.outside:,} outside; {'restored' if change.restored else 'NOT restored'}{rebound}"
    )


def _phases(answer: Intervened) -> Table:
    rows = [
        [
            *(clean(phase.name), _WHAT[answer.kind].get(phase.name, "")),
            f"{phase.first_round:02}-{phase.first_round + phase.rounds - 1:02}",
            *(f"{phase.requests:,}", f"{phase.cached_tokens:,}", _reset(phase)),
        ]
        for phase in answer.phases
    ]
    header = ["phase", "what", "rounds", "requests", "cached prompt tokens", "prefix cache before it"]
    return Table(header, rows, frozenset({3, 4}))


def _reset(phase: PhaseSummary) -> str:
    if phase.reset is None:
        return "left as it was"
    return "reset" if phase.reset else "NOT reset"


def _named(answer: Intervened, phase: str) -> str:
    return f"{phase} ({_WHAT[answer.kind][phase]})"
