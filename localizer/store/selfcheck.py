"""Do the rows account for the work that was done? Asked when a capture is finished, and by verify."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import numpy as np

from localizer.store.expected import applicable, is_draft
from localizer.store.reader import Capture
from localizer.store.schema import UNFINISHED, Output
from localizer.store.trace import StepTrace
from localizer.wire.spec import TOKEN_ROWS


def unaccounted(capture: Capture, outputs: Sequence[Output]) -> list[str]:
    """Where rows and returned tokens contradict each other, in sentences; empty if they agree.

    Every position from the cached ones up to the last but one must have been computed (the last token is
    never fed), and the token that the last row at a position decided must be the one that was returned. A
    request that was not finished may have any rows beyond what was returned of it.
    """
    columns = capture.table.columns
    target, deciding = ~is_draft(columns), applicable(columns, TOKEN_ROWS)
    number = {name: index for index, name in enumerate(capture.requests)}
    order = np.argsort(columns["request"], kind="stable")
    starts = np.searchsorted(columns["request"][order], np.arange(len(number) + 1))
    missing: list[str] = []
    different: list[str] = []
    for output in outputs:
        index = number[output.request]
        rows = order[starts[index] : starts[index + 1]]
        length = len(capture.prompts[output.request])
        if output.finish in UNFINISHED and not output.tokens:
            continue
        fed = length + len(output.tokens) - 1
        computed = set(columns["position"][rows[target[rows]]].tolist())
        if not computed.issuperset(range(min(output.cached_tokens, length), fed)):
            missing.append(output.request)
        chosen = rows[deciding[rows]]
        decided = dict(
            zip(columns["position"][chosen].tolist(), columns["sampled"][chosen].tolist(), strict=True)
        )
        if [decided.get(length - 1 + place) for place in range(len(output.tokens))] != output.tokens:
            different.append(output.request)
    reasons = []
    if missing:
        reasons.append(f"rows of {len(missing)} requests are missing, first of {missing[0]}")
    if different:
        reasons.append(
            f"the rows of {len(different)} requests decided other tokens than were returned, "
            f"first those of {different[0]}"
        )
    return reasons


def unfinished(outputs: Sequence[Output]) -> list[str]:
    """What was not returned: requests that were aborted or failed, logprobs; a sentence for each reason."""
    by_reason: dict[str, list[str]] = {}
    for output in outputs:
        if output.finish in UNFINISHED:
            by_reason.setdefault(output.finish, []).append(output.request)
    reasons = [
        f"{len(names)} requests were not finished (finish reason {finish!r}), first {names[0]}"
        for finish, names in by_reason.items()
    ]
    asked = any(output.logprobs for output in outputs)
    odd = [
        output.request
        for output in outputs
        if asked
        and (
            len(output.logprobs) != len(output.tokens)
            or any(
                token not in dict(found) for token, found in zip(output.tokens, output.logprobs, strict=True)
            )
        )
    ]
    if odd:
        reasons.append(f"{len(odd)} requests lack logprobs of returned tokens, first {odd[0]}")
    return reasons


ASKED = ("step", "requests", "scheduled", "computed", "cached", "drafts")
"""What is asked of all workers alike in a step."""


def apart(capture: Capture) -> list[str]:
    """Where the workers of a capture did not do the same, in sentences; empty if they did."""
    reasons, first = list(capture.short), capture.scheduled_by
    for rank, steps in capture.traces() if capture.open.observer.ranks > 1 else ():
        if rank == first:
            continue
        pairs = zip_longest(capture.steps, steps)
        odd = next((one or other for one, other in pairs if _asked(one) != _asked(other)), None)
        if odd is not None:
            reasons.append(f"rank {rank} was scheduled other steps than rank {first}, first step {odd.step}")
    return reasons


def _asked(trace: StepTrace | None) -> list[object] | None:
    return None if trace is None else [getattr(trace, name) for name in ASKED]


def mistraced(capture: Capture, counts: Mapping[str, int]) -> list[str]:
    """Where rows and schedule trace contradict each other, in sentences; empty if they agree.

    Each step must have exactly the target rows that the trace says were scheduled. `counts` are the
    manifest's; a capture made before there was a trace does not count `traced_steps`.
    """
    if "traced_steps" not in counts:
        return []
    if len(capture.steps) != counts["traced_steps"]:
        return [f"it holds the schedule of {len(capture.steps)} steps instead of {counts['traced_steps']}"]
    columns = capture.table.columns
    target = ~is_draft(columns)
    steps, requests = columns["step"][target].tolist(), columns["request"][target].tolist()
    recorded = Counter(zip(steps, requests, strict=True))
    scheduled = Counter(
        {
            (trace.step, request): count
            for trace in capture.steps
            for request, count in zip(trace.requests, trace.scheduled, strict=True)
        }
    )
    odd = {step for (step, _), _ in recorded.items() ^ scheduled.items()}
    if not odd:
        return []
    return [f"the rows of {len(odd)} steps are not those that were scheduled, first in step {min(odd)}"]
