"""Strict token parity, round by round, and what both sides had to choose from where tokens first differ."""

from __future__ import annotations

from collections import defaultdict

from localizer.diff.record import Both
from localizer.diff.result import Logits, Result, TopTwo
from localizer.diff.runs import LOGITS, LOGPROBS, Choice, FirstToken, Parity, RoundParity
from localizer.diff.steady import compare_logprobs, logprobs
from localizer.diff.tokens import RequestTokens, TokenComparison, compare_tokens
from localizer.store.reader import Capture


def parity(candidate: Capture, parent: Capture, result: Result) -> Parity:
    """Compare the tokens of two runs; `result` is a diff that may hold the logits of the first difference."""
    found = compare_tokens(candidate, parent, equal_workloads=True)
    compared, differ, _ = compare_logprobs(candidate, parent)
    return Parity(
        captures=Both(candidate=candidate.label, parent=parent.label),
        tapped=candidate.open.observer.taps,
        tokens=found.tokens,
        rounds=rounds(candidate, found),
        first=_first(candidate, parent, found, result),
        logprobs_compared=compared,
        logprobs_differ=differ,
    )


def rounds(capture: Capture, found: TokenComparison) -> list[RoundParity]:
    """Token parity of every round of the matrix."""
    by_round: dict[int, list[RequestTokens]] = defaultdict(list)
    for request in found.requests:
        by_round[int(request.candidate.partition(".")[0].removeprefix("r"))].append(request)
    sizes = capture.open.workload.matrix
    return [
        RoundParity(
            round=number,
            batch=sizes[number % len(sizes)],
            requests=len(requests),
            requests_differ=sum(request.first is not None for request in requests),
            positions=sum(request.positions for request in requests),
            positions_differ=sum(request.differ for request in requests),
        )
        for number, requests in sorted(by_round.items())
    ]


def _first(candidate: Capture, parent: Capture, found: TokenComparison, result: Result) -> FirstToken | None:
    first, pair = found.tokens.first, found.first
    if first is None or pair is None:
        return None
    index = first.output_index
    ours, theirs = (_token(it, pair.candidate, index) for it in (candidate, parent))
    tops: list[TopTwo | None] = [top(it, pair.candidate, index) for it in (candidate, parent)]
    measured = LOGPROBS if all(tops) else None
    symptom = result.rows.symptom
    if symptom is not None and (symptom.request, symptom.output_index) == (first.request, index):
        logits: Logits | None = symptom.logits
        if logits is not None:
            tops, measured = [logits.candidate, logits.parent], LOGITS
    return FirstToken(
        request=first.request,
        position=first.position,
        output_index=index,
        measured=measured,
        candidate=Choice(token=ours, top=tops[0]),
        parent=Choice(token=theirs, top=tops[1]),
    )


def _token(capture: Capture, request: str, index: int) -> int | None:
    tokens = capture.outputs.get(request, [])
    return tokens[index] if index < len(tokens) else None


def top(capture: Capture, request: str, index: int) -> TopTwo | None:
    """The two most likely tokens by the log probabilities that vLLM returned; None where it did not."""
    returned = logprobs(capture).get(request, [])
    here = returned[index] if index < len(returned) else []
    finite = [(token, value) for token, value in here if isinstance(value, float)]
    if not finite or len(finite) < min(len(here), 2):
        return None
    likely = sorted(finite, key=lambda item: -item[1])
    first, value = likely[0]
    if len(likely) == 1:
        return TopTwo(top1=first, top1_value=value, top2=None, top2_value=None, margin=None, tie=False)
    second, other = likely[1]
    margin = value - other
    return TopTwo(top1=first, top1_value=value, top2=second, top2_value=other, margin=margin, tie=margin == 0)
