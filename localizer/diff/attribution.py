"""What further captures of the parent say about a divergence, as records (docs/result.md)."""

from __future__ import annotations

from typing import Any

from localizer.diff.record import Record

NO_CONTROL, CANDIDATE_ONLY, ALSO_IN_CONTROL = "no-control", "candidate-only", "also-in-control"
"""Does the parent differ from itself where the candidate differs from it? `NO_CONTROL`: nothing says so."""

EQUAL, DIFFERS, UPSTREAM, OTHER_TOKENS = "equal", "differs", "differs-upstream", "tokens-differ-before"
NO_SITE, NO_ROW, NOT_RECORDED, NOT_EXAMINED, NO_PLACE = (
    "no-site",
    "no-row",
    "not-recorded",
    "not-examined",
    "no-place",
)
"""What a control shows at a place; from `NO_SITE` on it shows nothing, for the reason named."""

INCOMPLETE_CONTROL, ANOTHER_SOURCE, ANOTHER_WORKLOAD, OTHER_SETTINGS, OTHER_MACHINE = (
    "incomplete",
    "another-source",
    "another-workload",
    "other-settings",
    "other-machine",
)
"""Why a capture of the parent's model is no second sample of the parent's run: it attributes nothing."""


class ControlPlace(Record, frozen=True, kw_only=True):
    """A row and site of the parent at which it differs from a control."""

    request: str
    position: int
    step: int
    site: str


class Unfit(Record, frozen=True, kw_only=True):
    """Why a control attributes nothing; its sentence is made in `report/`.

    Attributes:
        code: "incomplete", "another-source", "another-workload", "other-settings" or "other-machine".
        detail: what the capture says of itself (untrusted), or the first setting that is not the parent's.
        control, parent: the values of that setting.
    """

    code: str
    detail: str = ""
    control: Any = None
    parent: Any = None


class ControlFacts(Record, frozen=True, kw_only=True):
    """One control, compared with the parent.

    Attributes:
        label, path, created, vllm, state: of the capture, as of the two that are compared.
        unfit: why it attributes nothing; empty where it may.
        verdict: of control against parent.
        rows: pairs of rows.
        compared, differ: row x site pairs.
        requests, requests_differ, positions, positions_differ: of returned tokens.
        first: the causally first place at which parent and control differ.
        at_first: what it shows at the first difference of candidate and parent.
        upstream: where `at_first` is "differs-upstream", the causally first such place.
    """

    label: str
    path: str
    created: str
    vllm: str
    state: str
    unfit: list[Unfit]
    verdict: str
    rows: int
    compared: int
    differ: int
    requests: int
    requests_differ: int
    positions: int
    positions_differ: int
    first: ControlPlace | None
    at_first: str
    upstream: ControlPlace | None


class RequestAttribution(Record, frozen=True, kw_only=True):
    """Whether the first difference of a request of the candidate is also in a control."""

    request: str
    attribution: str


class SiteControl(Record, frozen=True, kw_only=True):
    """Row pairs of one site that differ.

    Attributes:
        candidate_only: in candidate/parent, and equal in every control that compared them (at least one).
        both: in candidate/parent and in a control.
        control_only: in a control, and compared and equal in candidate/parent.
        not_covered: in candidate/parent, and compared in no control.
    """

    site: str
    candidate_only: int
    both: int
    control_only: int
    not_covered: int


class Controls(Record, frozen=True, kw_only=True):
    """What the controls say.

    Attributes:
        captures: the controls, in the order given.
        requests: for each request that differs, in causal order.
        sites: those at which candidate or control differ from the parent, in the candidate's execution order.
    """

    captures: list[ControlFacts]
    requests: list[RequestAttribution]
    sites: list[SiteControl]
