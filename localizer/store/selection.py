"""Which rows keep their payload: rows of requests, in transactions; digests always cover all."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

REQUEST = re.compile(r"r\d{2,}\.\d{2,}")
ALL, LAST = "all", "last"
AROUND = 1
"""How many positions on each side of the one named by `around:` are looked at as well."""


@dataclass(frozen=True)
class RowRule:
    """Rows of one request (None: of every one): at `positions` (None: at all), or only those for logits."""

    request: str | None
    positions: tuple[range, ...] | None
    last: bool = False

    def wants(self, request: str, position: int, for_logits: bool) -> bool:
        """Whether a row is one of these."""
        if self.request not in (None, request) or (self.last and not for_logits):
            return False
        return self.positions is None or any(position in span for span in self.positions)


@dataclass(frozen=True)
class Selection:
    """A printable plan of what is kept.

    Attributes:
        rules: a row is kept if one of them wants it ...
        first: ... in the first so many transactions (None: in all) ...
        around: ... or, where this is given, in those that compute a position next to (request, position).
    """

    rules: tuple[RowRule, ...] = (RowRule(None, None),)
    first: int | None = None
    around: tuple[str, int] | None = None

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return self == EVERYTHING


EVERYTHING = Selection()


def parse(rows: Sequence[str], transactions: str, requests: Container[str]) -> Selection:
    """The selection that options describe.

    Args:
        rows: each `all`, `last`, `REQUEST`, or `REQUEST:POSITIONS` with positions as `40-48`, `41` or `last`.
        transactions: `all`, `first:N`, or `around:REQUEST@POSITION`.
        requests: the workload's request ids.

    Raises:
        ValueError: something is malformed or names a request that is not there; the message says what.
    """
    rules = tuple(_rule(text, requests) for text in rows or (ALL,))
    if transactions == ALL:
        return Selection(rules)
    kind, _, what = transactions.partition(":")
    if kind == "first" and what.isdigit() and int(what):
        return Selection(rules, first=int(what))
    request, _, position = what.partition("@")
    if kind == "around" and position.isdigit():
        return Selection(rules, around=(_known(request, requests), int(position)))
    raise ValueError(f"{transactions!r} is none of all, first:2 and around:r03.05@41")


def _rule(text: str, requests: Container[str]) -> RowRule:
    if text in (ALL, LAST):
        return RowRule(None, None, text == LAST)
    request, colon, places = text.partition(":")
    _known(request, requests)
    if not colon:
        return RowRule(request, None)
    if places == LAST:
        return RowRule(request, None, True)
    spans = []
    for part in places.split(","):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ValueError(f"{part!r} is neither a position nor a range such as 40-48")
        spans.append(range(int(low), int(high if dash else low) + 1))
        if not spans[-1]:
            raise ValueError(f"the range {part!r} runs backwards")
    return RowRule(request, tuple(spans))


def _known(request: str, requests: Container[str]) -> str:
    if request not in requests:
        raise ValueError(f"there is no request {request!r}; requests are named r00.00 (round and index)")
    return request


class Selector:
    """Applies a selection to the transactions of a run, in their order.

    Args:
        selection: what is kept.
        phases: by request the number of its phase, and its id in the first one: what is asked for is kept in
            each phase. Empty where there are none.
    """

    def __init__(self, selection: Selection, phases: Mapping[str, tuple[int, str]] | None = None) -> None:
        self._selection, self._phases, self._phase = selection, phases or {}, 0
        self.everything = selection.everything
        self._seen = 0
        self._open = False

    def begin(self, requests: Sequence[str], positions: Sequence[int]) -> None:
        """A forward of the target begins; request id and position of each of its rows."""
        chosen = self._selection
        if self._phases:
            phase = max((self._phases[request][0] for request in requests), default=self._phase)
            self._seen, self._phase = self._seen if phase == self._phase else 0, phase
            requests = [self._phases[request][1] for request in requests]
        named = {rule.request for rule in chosen.rules}
        self._open = None in named or not named.isdisjoint(requests)
        self._seen += self._open
        if chosen.first is not None and self._seen > chosen.first:
            self._open = False
        if chosen.around is not None:
            request, position = chosen.around
            near = range(position - AROUND, position + AROUND + 1)
            self._open &= any(r == request and p in near for r, p in zip(requests, positions, strict=True))

    def wants(self, request: str, position: int, for_logits: bool) -> bool:
        """Whether a row of this forward, or of a draft step in it, is kept."""
        request = self._phases[request][1] if self._phases else request
        return self._open and any(rule.wants(request, position, for_logits) for rule in self._selection.rules)
