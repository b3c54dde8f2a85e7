"""What a map of a diff is drawn from: for each request its rows, what each site says of them, and numbers."""

from __future__ import annotations

import msgspec

from localizer.diff.elements import CLASSES
from localizer.diff.record import Both, Record, Value

EQUAL, DIFFERENT, NOT_COMPARED, NOT_APPLICABLE = "=?-."
"""What is known of a row at a site, one character each; `DIFFERENT` where only the digests were read."""

CLASS_STATES = dict(zip(CLASSES, "zn1kvfsd", strict=True))
"""The same for a row that differs, by its class."""


class Cell(Record, frozen=True, kw_only=True):
    """One differing row of a site; the fields but for the first two are those of a finding.

    Attributes:
        row: index into the rows of its request.
        site: index into the sites.
    """

    row: int
    site: int
    class_: str | None = msgspec.field(name="class")
    elements_differ: int | None
    elements: int | None
    first_element: list[int] | None
    max_ulp: int | None
    max_abs: float | None
    max_rel: float | None
    cosine: float | None
    values: Both[Value] | None
    within_tolerance: bool | None


class MappedRow(Record, frozen=True, kw_only=True):
    """One row of the candidate; `parent_request` and `parent_step` are None where it has no counterpart.

    `states` has a character for each site: one of those above.
    """

    position: int
    step: int
    kind: str
    parent_request: str | None
    parent_step: int | None
    states: str


class MappedRequest(Record, frozen=True, kw_only=True):
    """One request of the candidate.

    Attributes:
        rows: in causal order, without a draft's padding.
        rows_before, rows_after: how many were left out before and behind them.
        differ: row x site pairs of the request that differ, in all.
        cells: the causally first of these.
        cells_left_out: how many there are besides.
    """

    request: str
    rows: list[MappedRow]
    rows_before: int
    rows_after: int
    differ: int
    cells: list[Cell]
    cells_left_out: int


class Cells(Record, frozen=True, kw_only=True):
    """The map of a diff.

    Attributes:
        sites: that both captures hold, the target's and then the draft's, each in execution order.
        requests: those that differ in causal order of their first differences, then the others.
        requests_left_out: requests that are not listed.
        cells_left_out: differing row x site pairs without a cell, of requests listed or not.
    """

    sites: list[str]
    requests: list[MappedRequest]
    requests_left_out: int
    cells_left_out: int


class ReturnedTokens(Record, frozen=True, kw_only=True):
    """Tokens that two requests returned that were asked the same, and that differ.

    Attributes:
        prompt_tokens: length of the prompt: output i is at position `prompt_tokens` + i.
        first: output index of the first difference.
        differ, positions: output positions that differ, and that were compared.
        lengths: how many tokens each side returned.
        start: output index of the first token of `tokens`.
        tokens: token ids from there on.
    """

    request: str
    parent_request: str
    prompt_tokens: int
    first: int
    differ: int
    positions: int
    lengths: Both[int]
    start: int
    tokens: Both[list[int]]


class Returned(Record, frozen=True, kw_only=True):
    """Requests whose tokens differ, in causal order, and how many of them are not listed."""

    requests: list[ReturnedTokens]
    requests_left_out: int
