"""The verdict and its reasons, by fixed rules in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

from localizer.diff.result import (
    CANDIDATE,
    DIVERGED,
    IDENTICAL,
    INCONCLUSIVE,
    PARENT,
    Both,
    Coverage,
    Reason,
    Tokens,
)
from localizer.diff.runs import Parity, Repetition, Witness
from localizer.store.reader import Capture

EXIT_CODES = {IDENTICAL: 0, DIVERGED: 1, INCONCLUSIVE: 3}

# codes of reasons
DIFFERENT_MODEL, NO_COMMON_PREFIX = "different-model", "no-common-prefix"
INCOMPLETE, MISSING, NO_ROWS, NOTHING_COMPARED = (
    "incomplete-capture",
    "missing-rows",
    "no-rows",
    "nothing-compared",
)
NOT_REPRODUCIBLE, NOTHING_REPEATS = "not-reproducible", "nothing-repeats"
SOURCE_UNSTEADY, NOT_NEUTRAL, NOT_REPRODUCED, OUTPUTS_DIFFER = (
    "source-not-reproducible",
    "observer-not-neutral",
    "witness-not-reproduced",
    "outputs-differ",
)
RUN_UNFINISHED, WITNESS_UNFINISHED, NOT_PINNED = (
    "run-unfinished",
    "witness-unfinished",
    "kv-blocks-not-set",
)

REASONS = (
    *(DIFFERENT_MODEL, NO_COMMON_PREFIX, INCOMPLETE, MISSING, NO_ROWS, NOTHING_COMPARED),
    *(NOT_REPRODUCIBLE, NOTHING_REPEATS),
    *(SOURCE_UNSTEADY, NOT_NEUTRAL, NOT_REPRODUCED, OUTPUTS_DIFFER),
    *(RUN_UNFINISHED, WITNESS_UNFINISHED, NOT_PINNED),
)
"""Codes of reasons, as docs/result.md explains them."""


def different_models(candidate: Capture, parent: Capture) -> bool:
    """Whether the models are not the same: by their files where both are known, else by name."""
    ours, theirs = candidate.open.workload.model, parent.open.workload.model
    if ours.files and theirs.files:
        return ours.files != theirs.files
    return ours.name != theirs.name


def not_comparable(candidate: Capture, parent: Capture, tokens: Tokens, paired_rows: int) -> list[Reason]:
    """Why the two were not asked to compute the same; empty when they were."""
    if different_models(candidate, parent):
        return [Reason(code=DIFFERENT_MODEL)]
    if len(candidate.table) and len(parent.table) and not paired_rows and not tokens.requests:
        return [Reason(code=NO_COMMON_PREFIX)]
    return []


def incompleteness(candidate: Capture, parent: Capture, coverage: Coverage) -> list[Reason]:
    """What was to be compared and could not be."""
    reasons = []
    for source, capture in ((CANDIDATE, candidate), (PARENT, parent)):
        if not capture.complete:
            texts = capture.reasons or ["its records do not say why"]
            reasons += [Reason(code=INCOMPLETE, source=source, detail=text) for text in texts]
    missing = coverage.pairs.missing
    reasons += [
        Reason(code=MISSING, source=source, count=count)
        for source, count in ((CANDIDATE, missing.candidate), (PARENT, missing.parent))
        if count
    ]
    if not coverage.pairs.compared:
        empty = [
            Reason(code=NO_ROWS, source=source)
            for source, capture in ((CANDIDATE, candidate), (PARENT, parent))
            if not len(capture.table)
        ]
        reasons += empty or [Reason(code=NOTHING_COMPARED)]
    return reasons


def unsteady(tokens: Tokens) -> list[Reason]:
    """Sources that do not repeat themselves."""
    repeats = tokens.repeats_equal or Both[bool | None](candidate=None, parent=None)
    return [
        Reason(code=NOT_REPRODUCIBLE, source=source)
        for source, equal in ((CANDIDATE, repeats.candidate), (PARENT, repeats.parent))
        if equal is False
    ]


def untrusted(
    first_pass: str,
    reasons: Sequence[Reason],
    parity: Parity,
    untapped: Sequence[Repetition],
    observer: Sequence[Repetition],
    repeats: Sequence[Repetition],
    witness: Witness | None,
    *,
    unpinned: Sequence[Reason] = (),
    unfinished: Sequence[Reason] = (),
    unfinished_again: Sequence[Reason] = (),
) -> tuple[str, list[Reason]]:
    """The verdict of a run, from that of its first pass and from what the runs say of each other.

    It is inconclusive, with the differences listed, where the observer is not neutral, a run without taps
    did not finish, the witness did not come again, or the numbers of KV blocks could not be made equal. A
    source that is not reproducible is a reason beside the verdict. Nothing is identical while tokens or log
    probabilities of the two sources differ, or while a further run with taps differs or did not finish.

    Args:
        first_pass: verdict of the diff of the first pass.
        reasons: of that diff.
        parity: of runs without taps where there are any.
        untapped: see `localizer.diff.runs.RunResult`, as of the next two.
        observer: runs with taps against runs without.
        repeats: further runs with taps.
        witness: None where there was nothing to witness.
        unpinned: runs that have other numbers of KV blocks than was set.
        unfinished: runs without taps that did not finish.
        unfinished_again: controls, and further runs of the candidate, that did not finish.
    """
    unsteady = [item.source for item in (*untapped, *repeats) if item.different]
    beside = [Reason(code=SOURCE_UNSTEADY, source=source) for source in dict.fromkeys(unsteady)]
    beside += unfinished_again
    against = [
        Reason(code=NOT_NEUTRAL, source=item.source, count=sum(it.source == item.source for it in untapped))
        for item in observer
        if item.different
    ]
    against += [*unfinished, *unpinned]
    if witness is not None and not witness.reproduced:
        code = NOT_REPRODUCED if witness.finished else WITNESS_UNFINISHED
        against.append(Reason(code=code, count=len(witness.tries)))
    if against:
        return INCONCLUSIVE, [*against, *reasons, *beside]
    comparable = not any(reason.code in (DIFFERENT_MODEL, NO_COMMON_PREFIX) for reason in reasons)
    if first_pass != DIVERGED and comparable and (parity.tokens.positions_differ or parity.logprobs_differ):
        return DIVERGED, [Reason(code=OUTPUTS_DIFFER), *reasons, *beside]
    if first_pass == IDENTICAL and (unfinished_again or any(item.different for item in repeats)):
        return INCONCLUSIVE, [*beside, *reasons]
    return first_pass, [*reasons, *beside]


def decide(
    not_comparable: list[Reason],
    incomplete: list[Reason],
    unsteady: list[Reason],
    tokens: Tokens,
    differ: int,
) -> tuple[str, list[Reason]]:
    """The verdict, with the reasons that limit it or stand beside it.

    Damaged captures never come this far. Then, in this order: what cannot be compared is inconclusive; any
    difference is a divergence, in incomplete captures too; anything incomplete is inconclusive; the rest is
    identical.

    Args:
        not_comparable: from `not_comparable`.
        incomplete: from `incompleteness`.
        unsteady: from `unsteady`.
        tokens: token parity.
        differ: row x site pairs and proposed tokens that differ.
    """
    if not_comparable:
        others = [reason for reason in incomplete if reason.code != NOTHING_COMPARED]
        return INCONCLUSIVE, [*not_comparable, *others]
    if differ or tokens.positions_differ:
        return DIVERGED, [*incomplete, *unsteady]
    if incomplete:
        return INCONCLUSIVE, [*incomplete, *unsteady]
    return IDENTICAL, unsteady
