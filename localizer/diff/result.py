"""The result of a diff: one tree of records, from which every report is rendered (docs/result.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from localizer.diff.attribution import NO_CONTROL as NO_CONTROL
from localizer.diff.attribution import Controls
from localizer.diff.cells import Cells, Returned
from localizer.diff.plan import Plan
from localizer.diff.record import Both, Record
from localizer.diff.record import Value as Value
from localizer.store.schema import Native

SCHEMA = 1

IDENTICAL, DIVERGED, INCONCLUSIVE = "identical", "diverged", "inconclusive"
CANDIDATE, PARENT, CAPTURE = "candidate", "parent", "capture"


class Reason(Record, frozen=True, kw_only=True):
    """Something that limits the verdict or stands beside it; its sentence is made in `report/`.

    Attributes:
        code: see `localizer.diff.verdict`.
        source: "candidate", "parent", "capture" (one is compared with itself), or None for both.
        detail: text kept from a capture (untrusted), else empty.
        count: how many, where something is counted.
    """

    code: str
    source: str | None = None
    detail: str = ""
    count: int = 0


class CaptureFacts(Record, frozen=True, kw_only=True):
    """Which capture was read: label NAME/NNNN, folder as given, ISO time, vLLM version, "complete" or not.

    `native` is the native code that its source changes and that was not rebuilt.
    """

    label: str
    path: str
    created: str
    vllm: str
    state: str
    native: Native | None = None


class TokenFirst(Record, frozen=True, kw_only=True):
    """The earliest token that differs; `position` is absolute (prompt length + output index)."""

    request: str
    position: int
    output_index: int


class Tokens(Record, frozen=True, kw_only=True):
    """Token parity of the paired requests.

    Attributes:
        paired_by: "request" when the workloads are equal, else "prompt" (equal prompt, order of appearance).
        requests, requests_differ: paired requests that both sides have tokens of, and those that differ.
        positions, positions_differ: output positions; where a finished pair has unequal lengths every missing
            one differs.
        requests_unpaired: requests that have no counterpart or no tokens on one side.
        requests_unfinished: paired requests that one side did not finish: only their common length counts.
        prompts_equal: whether every prompt that both use at the same index is the same.
        repeats_equal: whether later passes returned the tokens of the first; None with one pass.
        first: the earliest difference.
    """

    requests: int
    requests_differ: int
    positions: int
    positions_differ: int
    prompts_equal: bool
    repeats_equal: Both[bool | None] | None
    first: TokenFirst | None
    paired_by: str
    requests_unpaired: int
    requests_unfinished: int


class Segment(Record, frozen=True, kw_only=True):
    """The code between two sites: `after` is equal (None: nothing upstream compared), `before` differs.

    `after_code` and `before_code` are file, line and function of vLLM's source where the two pass, in that of
    `code_of`: "candidate", or "parent" where only that says so; None where neither does.
    """

    after: str | None
    before: str
    after_code: str | None = None
    before_code: str | None = None
    code_of: str | None = None


class Unobserved(Record, frozen=True, kw_only=True):
    """What is known to lie inside a segment without having been compared on that row.

    Attributes:
        layers: numbers of layers of which no site was compared.
        sites: names of sites.
        later_layers: layers after the last recorded one may lie inside, since not all layers were recorded.
    """

    layers: list[int] = msgspec.field(default_factory=list)
    sites: list[str] = msgspec.field(default_factory=list)
    later_layers: bool = False


class KeyValueRows(Record, frozen=True, kw_only=True):
    """Key and value rows, as written, of the earlier positions that an attention output read.

    Attributes:
        positions: earlier positions of the request.
        equal, differ, not_compared: how many of them; `not_compared` were not recorded on both sides.
    """

    positions: int
    equal: int
    differ: int
    not_compared: int


class FedBy(Record, frozen=True, kw_only=True):
    """The row whose hidden states were fed to a draft's row: of the same request, in the same step.

    Attributes:
        draft_step: of that row; 0 for a row of the target.
        position: of that row.
        sites: what both captures hold of it: the target's hidden states, or all of the draft's own sites.
        equal, differ, not_compared: how many of these sites; `not_compared` were not recorded on both sides.
    """

    draft_step: int
    position: int
    sites: list[str]
    equal: int
    differ: int
    not_compared: int


class TopTwo(Record, frozen=True, kw_only=True):
    """The two highest logits of a row: token ids, values, their distance, and whether they tie."""

    top1: int
    top1_value: float
    top2: int | None
    top2_value: float | None
    margin: float | None
    tie: bool


class Logits(Record, frozen=True, kw_only=True):
    """What a pair of logits rows says about the token; a tie explains a flip, it does not excuse it."""

    candidate: TopTwo
    parent: TopTwo
    argmax_flip: bool


class Head(Record, frozen=True, kw_only=True):
    """One differing head of a row of shape [heads, head_dim]: its number, from 0, and how it differs.

    `class_` is the worst of its elements; `max_ulp` is None for integers, and where none is finite.
    """

    head: int
    class_: str = msgspec.field(name="class")
    elements_differ: int
    max_ulp: int | None


class Criterion(Record, frozen=True, kw_only=True):
    """A limit for an element: "ulp", "abs", or "rel" (to the parent)."""

    kind: str
    limit: float


class Tolerance(Record, frozen=True, kw_only=True):
    """What is marked as within tolerance at the sites that match a shell pattern.

    An element passes that meets one of the criteria of any tolerance for its site, a row all of whose
    differing elements pass; see `localizer.diff.tolerance` for what never does.
    """

    site: str
    criteria: list[Criterion]


class Finding(Record, frozen=True, kw_only=True):
    """A differing row of a site, with what lies upstream of it.

    Fields that need payload are None where only digests were kept.

    Attributes:
        request, position, kind, step, site: the row in the candidate; `step` counts over the capture from 0.
        parent_request, parent_step: the row it was paired with.
        segment, blame, unobserved: see `localizer.diff.localize`.
        key_value: only for attention outputs.
        fed_by: only where a segment begins with the draft; None too for a draft that takes no hidden states.
        class_: the worst class of an element, see `localizer.diff.numerics`.
        elements_differ, elements, first_element: first index in the shape of the row.
        max_ulp, max_abs, max_rel: over elements that are finite on both sides; `max_rel` is relative to the
            parent and leaves out elements where the parent is zero.
        cosine: of the two rows, all elements.
        values: the first differing element on both sides.
        logits: only for logits.
        heads: the first 256 differing heads of a row of shape [heads, head_dim]; None for other rows.
        heads_differ, heads_compared: how many of the row's heads differ, and how many it has.
        within_tolerance: None where no tolerance was given for the site, or without payload.
    """

    request: str
    position: int
    kind: str
    step: int
    site: str
    segment: Segment
    blame: str
    class_: str | None = msgspec.field(name="class")
    elements_differ: int | None
    elements: int | None
    first_element: list[int] | None
    max_ulp: int | None
    max_abs: float | None
    max_rel: float | None
    cosine: float | None
    values: Both[Value] | None
    logits: Logits | None
    key_value: KeyValueRows | None
    fed_by: FedBy | None
    unobserved: Unobserved
    heads: list[Head] | None
    heads_differ: int | None
    heads_compared: int | None
    within_tolerance: bool | None
    parent_request: str
    parent_step: int


class Summary(Record, frozen=True, kw_only=True):
    """The first difference in brief, as data; its sentence is made in `report/`.

    Attributes:
        inputs: what is known of the segment's inputs, see `localizer.diff.summary`.
        blame, after, site: what is between the last equal site (None: there is none) and the differing one.
        layer: number of the site's layer; None where it has none.
        request, position, kind: the row in the candidate.
        heads: numbers of the first 256 differing heads; None for rows without heads.
        heads_differ, heads_compared, class_, elements_differ, elements, max_ulp, within_tolerance: as in the
            finding.
        control: whether a run of the parent against itself shows the same: the result's attribution.
    """

    inputs: str
    blame: str
    after: str | None
    site: str
    layer: int | None
    request: str
    position: int
    kind: str
    heads: list[int] | None
    heads_differ: int | None
    heads_compared: int | None
    class_: str | None = msgspec.field(name="class")
    elements_differ: int | None
    elements: int | None
    max_ulp: int | None
    within_tolerance: bool | None
    control: str


class RowDifference(Record, frozen=True, kw_only=True):
    """One differing row of a site whose payload was read; the fields are those of a finding."""

    request: str
    position: int
    kind: str
    class_: str = msgspec.field(name="class")
    elements_differ: int | None
    max_ulp: int | None
    max_abs: float | None
    cosine: float | None
    within_tolerance: bool | None


class RequestFirst(Record, frozen=True, kw_only=True):
    """The first divergence of one request of the candidate."""

    request: str
    first: Finding


class Cause(Record, frozen=True, kw_only=True):
    """The first tensor that differs."""

    request: str
    position: int
    step: int
    site: str


class Amplifier(Record, frozen=True, kw_only=True):
    """The first row whose logits have another argmax."""

    request: str
    position: int
    step: int
    logits: Logits


class Symptom(Record, frozen=True, kw_only=True):
    """The first token that differs; `step` (the candidate's) and `logits` are of the row that decides it."""

    request: str
    position: int
    output_index: int
    step: int | None
    logits: Logits | None


class Rows(Record, frozen=True, kw_only=True):
    """Places of one divergence, often different rows; `target` is told only where `cause` is a draft's."""

    cause: Cause | None
    target: Cause | None
    amplifier: Amplifier | None
    symptom: Symptom | None


class SiteResult(Record, frozen=True, kw_only=True):
    """One site on all paired rows.

    Attributes:
        missing: pairs in which the row should have been recorded and was not, by side.
        class_, max_ulp: the worst among the `rows_read` differing rows whose payload was read.
        rows_within_tolerance: how many of `rows_read` are; None where no tolerance was given for the site.
        within_tolerance: whether all differing rows are; None where that is not known, since no tolerance was
            given for the site or not every differing row was read.
    """

    name: str = msgspec.field(name="site")
    rows_compared: int
    rows_differ: int
    missing: Both[int]
    class_: str | None = msgspec.field(name="class")
    max_ulp: int | None
    rows_read: int
    rows_within_tolerance: int | None
    within_tolerance: bool | None


class RowCoverage(Record, frozen=True, kw_only=True):
    """Rows of both captures and how many found their counterpart.

    Attributes:
        paired_by: "request+prefix" when the workloads are equal, "prefix" when not, "within" one capture.
        candidate, parent, paired: rows.
        unpaired: rows without a counterpart.
        draft_padding: those of `unpaired` that a draft computed for rejected tokens: never compared.
        past_token_difference: those of the other `unpaired` that follow a different token of their request.
        without_prefix: those of the other `unpaired` whose earlier tokens are unknown.
        without_counterpart: by kind, those of `unpaired` that are neither padding nor past a difference.
    """

    paired_by: str
    candidate: int
    parent: int
    paired: int
    unpaired: Both[int]
    past_token_difference: Both[int]
    without_prefix: Both[int]
    draft_padding: Both[int]
    without_counterpart: Both[dict[str, int]]


class SiteCoverage(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Sites that both hold, and those that only one holds.

    Attributes:
        not_comparable: sites that both hold, not among `shared`: their digests are of these algorithms.
        split: sites that each holds in other parts, by their names on a single worker, and in how many equal
            ranges of heads; 0 where it is not known which part a rank holds. They are in none of the others.
    """

    shared: int
    candidate_only: list[str]
    parent_only: list[str]
    not_applicable: dict[str, str]
    not_comparable: dict[str, Both[str]] = msgspec.field(default_factory=dict)
    split: dict[str, Both[int]] = msgspec.field(default_factory=dict)


class PairCoverage(Record, frozen=True, kw_only=True):
    """Row x site pairs, and how many of them are a draft's."""

    compared: int
    differ: int
    draft_compared: int
    draft_differ: int
    missing: Both[int]


class StoredCoverage(Record, frozen=True, kw_only=True):
    """Row x site pairs that both sides kept and that were compared byte for byte.

    Attributes:
        pairs, differ: how many of them, and how many of these differ: those whose digests do.
        bytes: of one side.
    """

    pairs: int
    differ: int
    bytes: int


class Coverage(Record, frozen=True, kw_only=True):
    """What was really compared: a claim never reaches past it.

    Attributes:
        layers: which attention layers each side was asked to record ("all", "first", indices, "none").
        payload: number of sites of which each side kept rows beside the digests.
        stored: what was compared byte for byte; None unless that was asked for.
        model_files_equal: None where the files of the model are not known on both sides.
        draft_files_equal: the same of the draft's; None too where a side has no draft model of its own.
        weights_equal: whether the weights as loaded have equal digests; None where a side does not say.
    """

    rows: RowCoverage
    sites: SiteCoverage
    pairs: PairCoverage
    layers: Both[str]
    payload: Both[int]
    model_files_equal: bool | None
    draft_files_equal: bool | None
    weights_equal: bool | None
    stored: StoredCoverage | None = None


class Acceptance(Record, frozen=True, kw_only=True):
    """What one side verified, and how many of those rows were compared with the other side's.

    Attributes:
        verifications: of one request in one step.
        proposed, accepted: draft tokens that were verified, and those taken.
        accepted_rows, rejected_rows: rows of the target by kind; each verification has one row more than it
            has draft tokens, the first, which counts as accepted.
        accepted_paired, rejected_paired: those with a counterpart on the other side.
        accepted_with_decode: those of `accepted_paired` whose counterpart is a plain decode row.
    """

    verifications: int
    proposed: int
    accepted: int
    accepted_rows: int
    rejected_rows: int
    accepted_paired: int
    rejected_paired: int
    accepted_with_decode: int


class ProposalFirst(Record, frozen=True, kw_only=True):
    """The draft's row from which another token was proposed, in the candidate."""

    request: str
    position: int
    step: int
    draft_step: int


class Proposals(Record, frozen=True, kw_only=True):
    """Tokens that the draft proposed from paired rows."""

    compared: int
    differ: int
    first: ProposalFirst | None


class Speculation(Record, frozen=True, kw_only=True):
    """Speculative decoding on both sides."""

    candidate: Acceptance
    parent: Acceptance
    proposals: Proposals


class Signature(Record, frozen=True, kw_only=True):
    """A pattern in where differences enter, see `localizer.diff.signature`.

    Attributes:
        code: which one.
        rows: rows that show it.
        equal_rows: equal rows, none of which shows it; 0 where the pattern is not one of rows.
        number: for "batch-size-over" the largest batch whose rows are equal, for "heads" the number of heads,
            for "one-rank" the rank, for "grows" and "decays" the factor (0: the difference is gone).
        heads: for "heads" those that differ.
    """

    code: str
    rows: int
    equal_rows: int = 0
    number: int | None = None
    heads: list[int] = msgspec.field(default_factory=list)


class FirstAt(Record, frozen=True, kw_only=True):
    """How many requests have their first difference at a site and position; `layer` is the layer's number."""

    site: str
    layer: int | None
    position: int
    requests: int


class Difference(Record, frozen=True, kw_only=True):
    """A setting that the captures record differently; None where a side does not have it."""

    setting: str
    candidate: Any
    parent: Any


class Result(Record, frozen=True, kw_only=True):
    """What two captures say about each other."""

    schema: int = SCHEMA
    verdict: str
    attribution: str
    controls: Controls | None
    reasons: list[Reason]
    workloads_equal: bool
    captures: Both[CaptureFacts]
    differences: list[Difference]
    tokens: Tokens
    speculation: Speculation | None
    tolerances: list[Tolerance]
    summary: Summary | None
    first: Finding | None
    first_rows: list[RowDifference]
    rows: Rows
    requests: list[RequestFirst]
    signatures: list[Signature]
    histogram: list[FirstAt]
    sites: list[SiteResult]
    coverage: Coverage
    plan: Plan | None = None
    cells: Cells | None = None
    returned: Returned | None = None
