"""Did both sources return the same tokens, and does each repeat itself?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from localizer.diff.result import Both, TokenFirst, Tokens
from localizer.store.expected import applicable
from localizer.store.reader import Capture
from localizer.store.schema import UNFINISHED, HiddenPrompt, Prompt
from localizer.store.schema import rounds as rounds_of
from localizer.wire.spec import TOKEN_ROWS

BY_REQUEST, BY_PROMPT = "request", "prompt"


@dataclass(frozen=True)
class RequestTokens:
    """Two requests that were asked the same.

    Attributes:
        candidate, parent: their ids.
        first: output index of the first difference; None if there is none.
        differ, positions: output positions that differ, and that were compared.
        finished: whether both sides finished it.
    """

    candidate: str
    parent: str
    first: int | None
    differ: int
    positions: int
    finished: bool


@dataclass(frozen=True)
class TokenComparison:
    """Token parity, and the differing requests by which the rows past a difference are told.

    Attributes:
        tokens: the totals.
        requests: every compared pair of requests.
        first: the pair of `tokens.first`.
        first_step: the candidate's step that decided the first difference; None if it is not known.
    """

    tokens: Tokens
    requests: tuple[RequestTokens, ...]
    first: RequestTokens | None
    first_step: int | None


def compare_tokens(
    candidate: Capture,
    parent: Capture,
    *,
    equal_workloads: bool,
    paired: Sequence[tuple[str, str]] | None = None,
) -> TokenComparison:
    """Compare the tokens of requests that were asked the same: those `paired`, or as `pair_requests` does."""
    if paired is None:
        paired = pair_requests(candidate, parent, equal_workloads=equal_workloads)
    ours, theirs = outputs_of_both(candidate, parent)
    done = _finished(candidate), _finished(parent)
    compared = tuple(
        _compare(one, other, ours[one], theirs[other], one in done[0] and other in done[1])
        for one, other in paired
        if one in ours and other in theirs
    )
    steps = DecidingSteps(candidate)
    differing = in_causal_order(compared, candidate, steps)
    first = differing[0] if differing else None
    most = max(len(candidate.requests), len(parent.requests))
    tokens = Tokens(
        requests=len(compared),
        requests_differ=len(differing),
        positions=sum(request.positions for request in compared),
        positions_differ=sum(request.differ for request in compared),
        prompts_equal=_prompts_equal(candidate, parent),
        repeats_equal=_repeats(candidate, parent),
        first=None
        if first is None
        else TokenFirst(
            request=first.candidate,
            position=len(candidate.prompts[first.candidate]) + (first.first or 0),
            output_index=first.first or 0,
        ),
        paired_by=BY_REQUEST if equal_workloads else BY_PROMPT,
        requests_unpaired=most - len(compared),
        requests_unfinished=sum(not request.finished for request in compared),
    )
    return TokenComparison(
        tokens, compared, first, None if first is None else steps.of(first.candidate, first.first or 0)
    )


def outputs_of_both(candidate: Capture, parent: Capture) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """The tokens of both sides by request, as far as both were asked for."""
    ours, theirs = candidate.outputs, parent.outputs
    asked = candidate.open.workload.max_tokens, parent.open.workload.max_tokens
    if asked[0] != asked[1]:  # what only one side was asked for is missing on no side
        ours = {name: tokens[: min(asked)] for name, tokens in ours.items()}
        theirs = {name: tokens[: min(asked)] for name, tokens in theirs.items()}
    return ours, theirs


def in_causal_order(
    requests: Iterable[RequestTokens], candidate: Capture, steps: DecidingSteps
) -> list[RequestTokens]:
    """Those that differ, by the candidate's step that decided their first difference, where it is known."""
    number = {name: index for index, name in enumerate(candidate.requests)}

    def causal(request: RequestTokens) -> tuple[bool, int, int, int]:
        step = steps.of(request.candidate, request.first or 0)
        return (step is None, step or 0, number[request.candidate], request.first or 0)

    return sorted((request for request in requests if request.first is not None), key=causal)


def pair_requests(candidate: Capture, parent: Capture, *, equal_workloads: bool) -> list[tuple[str, str]]:
    """Requests (candidate, parent) that were asked the same: of equal id, or of equal prompt in order."""
    if equal_workloads:
        return [(name, name) for name in candidate.requests]
    number = numbering()
    waiting: dict[int, list[str]] = defaultdict(list)
    for name, prompt in reversed(parent.prompts.items()):
        waiting[number(prompt)].append(name)
    pairs = []
    for name, prompt in candidate.prompts.items():
        if names := waiting.get(number(prompt)):
            pairs.append((name, names.pop()))
    return pairs


def numbering() -> Callable[[Prompt], int]:
    """A function that gives equal prompts equal numbers."""
    numbers: dict[tuple[int, ...] | HiddenPrompt, int] = {}
    known: dict[int, int] = {}

    def number(prompt: Prompt) -> int:
        if id(prompt) not in known:  # requests share their prompts: a long one is hashed once
            key = prompt if isinstance(prompt, HiddenPrompt) else tuple(prompt)
            known[id(prompt)] = numbers.setdefault(key, len(numbers))
        return known[id(prompt)]

    return number


class DecidingSteps:
    """Finds the row of a capture that decided a token: row p decides the token at position p + 1."""

    def __init__(self, capture: Capture) -> None:
        columns = capture.table.columns
        rows = np.flatnonzero(applicable(columns, TOKEN_ROWS))
        key = _key(columns["request"][rows], columns["position"][rows])
        order = np.argsort(key, kind="stable")
        self._rows, self._keys = rows[order], key[order]
        self._capture = capture
        self._number = {name: index for index, name in enumerate(capture.requests)}

    def row(self, request: str, output_index: int) -> int | None:
        """The row that decided a request's token `output_index`; the last, if there are several."""
        position = len(self._capture.prompts[request]) + output_index - 1
        key = _key(np.int64(self._number[request]), np.int64(position))
        end = int(np.searchsorted(self._keys, key, side="right"))
        return int(self._rows[end - 1]) if end and self._keys[end - 1] == key else None

    def of(self, request: str, output_index: int) -> int | None:
        """The step of that row."""
        row = self.row(request, output_index)
        return None if row is None else int(self._capture.table.columns["step"][row])


def _key(request: np.ndarray | np.int64, position: np.ndarray | np.int64) -> np.ndarray:
    return np.left_shift(np.asarray(request, np.int64), 32) + np.asarray(position, np.int64)


def _compare(one: str, other: str, ours: list[int], theirs: list[int], finished: bool) -> RequestTokens:
    shorter, longer = sorted((len(ours), len(theirs)))
    positions = longer if finished else shorter
    if ours[:shorter] == theirs[:shorter]:
        differ = positions - shorter
        return RequestTokens(one, other, shorter if differ else None, differ, positions, finished)
    where = [index for index in range(shorter) if ours[index] != theirs[index]]
    return RequestTokens(one, other, where[0], len(where) + positions - shorter, positions, finished)


def _finished(capture: Capture) -> set[str]:
    """Requests whose tokens are all there."""
    outputs = capture.manifest.outputs if capture.manifest is not None else []
    return {output.request for output in outputs if output.finish not in UNFINISHED}


def _prompts_equal(candidate: Capture, parent: Capture) -> bool:
    one, other = candidate.open.workload, parent.open.workload
    used = min(max(one.matrix, default=0), max(other.matrix, default=0))
    return one.prompts[:used] == other.prompts[:used]


def _repeats(candidate: Capture, parent: Capture) -> Both[bool | None] | None:
    if max(candidate.open.workload.repeats, parent.open.workload.repeats) < 2:
        return None
    return Both(candidate=repeats_equal(candidate), parent=repeats_equal(parent))


def repeats_equal(capture: Capture) -> bool | None:
    """Whether every later pass over the matrix returned the tokens of the first; None if nothing says so."""
    work = capture.open.workload
    done, outputs = _finished(capture), capture.outputs
    rounds = rounds_of(work.matrix, work.repeats)
    verdicts = [
        outputs[name] == outputs[first]
        for number, names in enumerate(rounds[len(work.matrix) :], len(work.matrix))
        for name, first in zip(names, rounds[number % len(work.matrix)], strict=True)
        if name in done and first in done
    ]
    return all(verdicts) if verdicts else None
