"""Two runs that should be equal: is a source reproducible, and is the observer neutral?"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from localizer.diff.align import align
from localizer.diff.compare import compare
from localizer.diff.result import TokenFirst
from localizer.diff.runs import OTHER_LOGPROBS, OTHER_ROWS, OTHER_TOKENS, SAME, UNFINISHED, Repetition
from localizer.diff.speculation import speculation
from localizer.diff.tokens import compare_tokens
from localizer.store.reader import Capture
from localizer.store.schema import LogProbability

Logprobs = list[list[tuple[int, LogProbability]]]


def compare_runs(source: str, one: Capture, other: Capture) -> Repetition:
    """Compare tokens and log probabilities of two runs of one source that did the same workload."""
    tokens = compare_tokens(one, other, equal_workloads=True)
    compared, differ, first = compare_logprobs(one, other)
    pairs, pairs_differ, proposals = _pairs(one, other)
    found = SAME
    if tokens.tokens.requests_differ:
        found = OTHER_TOKENS
    elif differ:
        found = OTHER_LOGPROBS
    elif pairs_differ or proposals:
        found = OTHER_ROWS
    elif not (one.complete and other.complete) or tokens.tokens.requests_unpaired:
        found = UNFINISHED
    return Repetition(
        source=source,
        one=one.label,
        other=other.label,
        differs=found,
        requests=tokens.tokens.requests,
        requests_differ=tokens.tokens.requests_differ,
        positions=tokens.tokens.positions,
        positions_differ=tokens.tokens.positions_differ,
        first=tokens.tokens.first,
        logprobs_compared=compared,
        logprobs_differ=differ,
        first_logprob=first,
        pairs_compared=pairs,
        pairs_differ=pairs_differ,
        proposals_differ=proposals,
    )


def _pairs(one: Capture, other: Capture) -> tuple[int | None, int | None, int | None]:
    """Row x site pairs that both recorded, those that differ, and draft rows that propose other tokens.

    None without taps.
    """
    if not (one.open.observer.taps and other.open.observer.taps):
        return None, None, None
    alignment = align(one, other)
    found, drafted = compare(one, other, alignment), speculation(one, other, alignment)
    proposals = 0 if drafted is None else drafted.proposals.differ
    return int(found.compared_rows.sum()), int(found.differ_rows.sum()), proposals


def logprobs(capture: Capture) -> Mapping[str, Logprobs]:
    """Log probabilities by request, as vLLM returned them; empty where none were asked for."""
    outputs = capture.manifest.outputs if capture.manifest is not None else []
    return {output.request: output.logprobs for output in outputs if output.logprobs}


def compare_logprobs(one: Capture, other: Capture) -> tuple[int | None, int | None, TokenFirst | None]:
    """How many positions were compared and differ, and the first of these in the order of requests.

    Behind a different token nothing is compared: the two were asked for something else there. Where only one
    of the two has any, though both returned the token, they differ.
    """
    ours, theirs = logprobs(one), logprobs(other)
    if not ours and not theirs:
        return None, None, None
    compared = differ = 0
    first = None
    for request in one.requests:
        tokens, others = one.outputs.get(request, []), other.outputs.get(request, [])
        pairs = zip_longest(ours.get(request, []), theirs.get(request, []))
        returned = zip(tokens, others, pairs, strict=False)
        for index, (token, another, (here, there)) in enumerate(returned):
            compared += 1
            if here != there:
                differ += 1
                position = len(one.prompts[request]) + index
                first = first or TokenFirst(request=request, position=position, output_index=index)
            if token != another:
                break
    return compared, differ, first
