"""The plan of a diff as records: what is paired, compared, ordered and decided, and why others are not."""

from __future__ import annotations

from localizer.diff.record import Both, Record

PADDING, UNKNOWN_PREFIX, PAST_DIFFERENCE = "draft-padding", "unknown-prefix", "past-token-difference"
NOT_ASKED, NO_ROWS_OF_REQUEST = "request-not-in-other", "request-without-rows"
MORE_OCCURRENCES, CACHED, ENDED = "more-occurrences", "cached-on-other-side", "ended-earlier"
NO_DRAFT, OTHER_PROPOSAL, NOT_TRIED = "no-draft-on-other-side", "other-proposal", "draft-not-tried"
NO_ROW, FIRST_OF_PREFIX, ONLY_ONE = "not-recorded", "first-of-its-prefix", "only-one-of-its-prefix"

UNPAIRED = (
    *(PADDING, UNKNOWN_PREFIX, NOT_ASKED, PAST_DIFFERENCE, NO_DRAFT, MORE_OCCURRENCES, NO_ROWS_OF_REQUEST),
    *(CACHED, ENDED, OTHER_PROPOSAL, NOT_TRIED, NO_ROW, FIRST_OF_PREFIX, ONLY_ONE),
)
"""Why a row has no counterpart, the first that holds; `NO_ROW` where nothing more is known. The last two are
of one capture compared with itself."""


class ExampleRow(Record, frozen=True, kw_only=True):
    """One row, for example; `occurrence` counts from 0 how often its request had computed it before."""

    request: str
    position: int
    kind: str
    step: int
    occurrence: int


class KindPairs(Record, frozen=True, kw_only=True):
    """Row pairs of a kind in the candidate with a kind in the parent, and how many differ at any site."""

    candidate: str
    parent: str
    rows: int
    differ: int


class RoundPairs(Record, frozen=True, kw_only=True):
    """Row pairs of a round of the candidate with one of the parent, as of kinds; `sizes` of their batches."""

    candidate: int
    parent: int
    sizes: Both[int]
    rows: int
    differ: int


class Repeated(Record, frozen=True, kw_only=True):
    """Keys that have more than one row on a side.

    Attributes:
        keys: how many of them.
        rows: their rows on that side.
        paired: those of the rows that have a counterpart.
        example: a row of such a key that is not the first.
    """

    keys: int
    rows: int
    paired: int
    example: ExampleRow | None


class UnpairedRows(Record, frozen=True, kw_only=True):
    """Rows of one side that have no counterpart for one reason, one of `UNPAIRED`."""

    reason: str
    rows: int
    example: ExampleRow


class AlignPlan(Record, frozen=True, kw_only=True):
    """How rows and sites were paired.

    Attributes:
        key: "request+prefix", "prefix" or "within".
        rounds: of both workloads.
        rows, paired: of both sides, and pairs.
        round_pairs, kind_pairs: the pairs by round and by kind.
        repeated: keys with more than one row; their k-th rows pair, within one capture each with the first.
        unpaired: by reason.
        shared: number of sites that both hold; the others by name, with the reason where a model has none.
    """

    key: str
    rounds: Both[int]
    rows: Both[int]
    paired: int
    round_pairs: list[RoundPairs]
    kind_pairs: list[KindPairs]
    repeated: Both[Repeated]
    unpaired: Both[list[UnpairedRows]]
    shared: int
    candidate_only: list[str]
    parent_only: list[str]
    not_applicable: dict[str, str]


class ComparePlan(Record, frozen=True, kw_only=True):
    """What was compared.

    Attributes:
        digest: the algorithm.
        compared, differ: row x site pairs.
        missing: pairs that one side should have recorded and has not.
        other_layout: sites whose rows have another dtype or shape on the two sides: they differ, whatever
            their bytes.
    """

    digest: str
    compared: int
    differ: int
    missing: Both[int]
    other_layout: list[str]


class PlannedPlace(Record, frozen=True, kw_only=True):
    """A differing row of the candidate, and the first site that differs on it."""

    request: str
    position: int
    kind: str
    step: int
    site: str


class LocalizePlan(Record, frozen=True, kw_only=True):
    """The causal order: pairs of rows that differ, and the first few of them."""

    rows: int
    first: list[PlannedPlace]


class Rule(Record, frozen=True, kw_only=True):
    """A rule of the verdict, and whether it holds; the first that holds decides."""

    rule: str
    holds: bool
    verdict: str


class Plan(Record, frozen=True, kw_only=True):
    """Align -> compare -> localize -> verdict."""

    align: AlignPlan
    compare: ComparePlan
    localize: LocalizePlan
    verdict: list[Rule]
