"""The returned tokens of requests in which they differ, around the first that does."""

from __future__ import annotations

from localizer.diff.cells import Returned, ReturnedTokens
from localizer.diff.record import Both
from localizer.diff.tokens import (
    DecidingSteps,
    RequestTokens,
    TokenComparison,
    in_causal_order,
    outputs_of_both,
)
from localizer.store.reader import Capture

MOST_REQUESTS = 64
"""Requests that are listed."""

MOST_TOKENS = 64
"""Tokens of a request that are listed."""

TOKENS_BEFORE = 16
"""How many of these stand before the first difference, where not all can be listed."""


def returned(candidate: Capture, parent: Capture, parity: TokenComparison) -> Returned:
    """The tokens of both sides, as far as both were asked for, of the causally first requests that differ."""
    differing = in_causal_order(parity.requests, candidate, DecidingSteps(candidate))
    ours, theirs = outputs_of_both(candidate, parent)
    return Returned(
        requests=[
            _tokens(request, len(candidate.prompts[request.candidate]), ours, theirs)
            for request in differing[:MOST_REQUESTS]
        ],
        requests_left_out=max(0, len(differing) - MOST_REQUESTS),
    )


def _tokens(
    request: RequestTokens, prompt: int, ours: dict[str, list[int]], theirs: dict[str, list[int]]
) -> ReturnedTokens:
    one, other = ours[request.candidate], theirs[request.parent]
    first = request.first or 0
    longest = max(len(one), len(other))
    start = max(0, min(first - TOKENS_BEFORE, longest - MOST_TOKENS))
    end = start + MOST_TOKENS
    return ReturnedTokens(
        request=request.candidate,
        parent_request=request.parent,
        prompt_tokens=prompt,
        first=first,
        differ=request.differ,
        positions=request.positions,
        lengths=Both(candidate=len(one), parent=len(other)),
        start=start,
        tokens=Both(candidate=one[start:end], parent=other[start:end]),
    )
