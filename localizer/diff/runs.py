"""The result of a whole run: both sources, with and without taps, controls and witness (docs/run.md)."""

from __future__ import annotations

from localizer.diff.record import Both, Record
from localizer.diff.result import Difference, Finding, Reason, Result, TokenFirst, Tokens, TopTwo
from localizer.store.schema import Probe

SCHEMA = 1

SAME, OTHER_TOKENS, OTHER_LOGPROBS, OTHER_ROWS, UNFINISHED = (
    "same",
    "tokens",
    "logprobs",
    "rows",
    "incomplete",
)
DIFFERS = frozenset({SAME, OTHER_TOKENS, OTHER_LOGPROBS, OTHER_ROWS, UNFINISHED})
"""What two runs that should be equal differ in; of runs that are not complete nothing is said."""


OWN_BLOCKS = "num_kv_blocks before it was set"
"""The setting by which sources differ that had other numbers of KV blocks before all were given one."""

LOGITS, LOGPROBS = "logits", "logprobs"
"""What a margin was taken from."""


class Repetition(Record, frozen=True, kw_only=True):
    """Two runs of one source that should have returned the same.

    Attributes:
        source: "candidate" or "parent".
        one, other: labels of the captures.
        differs: "same"; "tokens"; "logprobs" or "rows" where only log probabilities, or only recorded rows,
            do; "incomplete" where one of the two is.
        requests, requests_differ, positions, positions_differ: of tokens.
        first: the first token that differs.
        logprobs_compared, logprobs_differ: positions up to the first token difference of their request whose
            log probabilities were compared, and differ; None where neither run was asked for any.
        first_logprob: the first of them.
        pairs_compared, pairs_differ: row x site pairs, where both have taps.
        proposals_differ: paired draft rows from which other tokens were proposed; likewise.
    """

    source: str
    one: str
    other: str
    differs: str
    requests: int
    requests_differ: int
    positions: int
    positions_differ: int
    first: TokenFirst | None
    logprobs_compared: int | None
    logprobs_differ: int | None
    first_logprob: TokenFirst | None
    pairs_compared: int | None
    pairs_differ: int | None
    proposals_differ: int | None

    @property
    def different(self) -> bool:
        """Whether the two are seen to differ."""
        return self.differs in (OTHER_TOKENS, OTHER_LOGPROBS, OTHER_ROWS)

    @property
    def returned_otherwise(self) -> bool:
        """Whether they differ in what vLLM returned."""
        return self.differs in (OTHER_TOKENS, OTHER_LOGPROBS)


class RoundParity(Record, frozen=True, kw_only=True):
    """Token parity of one round: its number, batch size, and how many requests and positions differ."""

    round: int
    batch: int
    requests: int
    requests_differ: int
    positions: int
    positions_differ: int


class Choice(Record, frozen=True, kw_only=True):
    """What one side chose: the token, and the two most likely ones; None where nobody recorded them."""

    token: int | None
    top: TopTwo | None


class FirstToken(Record, frozen=True, kw_only=True):
    """The first token that differs; `measured` is "logits", "logprobs", or None where there is neither."""

    request: str
    position: int
    output_index: int
    measured: str | None
    candidate: Choice
    parent: Choice


class Parity(Record, frozen=True, kw_only=True):
    """Strict token parity of two runs, whole and by round.

    `logprobs_compared` and `logprobs_differ` are as of a `Repetition`.
    """

    captures: Both[str]
    tapped: bool
    tokens: Tokens
    rounds: list[RoundParity]
    first: FirstToken | None
    logprobs_compared: int | None
    logprobs_differ: int | None


class Way(Record, frozen=True, kw_only=True):
    """What is captured again: a request's rows up to a position.

    `why` is "token" where they lead to the first token that differs, "site" to the first differing row.
    """

    request: str
    position: int
    why: str


class Reproduction(Record, frozen=True, kw_only=True):
    """Did a witness capture compute again what the first pass had recorded there?

    Attributes:
        capture: its label.
        rows, rows_missing: rows of the first pass on the way to the witness; those that did not come again.
        compared, differ: row x site pairs, by digest.
        missing: pairs that the first pass holds and it does not.
        tokens_equal: whether the requests' tokens up to there are the first pass's.
        state: of the capture, "complete" or "incomplete".
        first_site, first_request, first_position: of the first pair that differs.
    """

    capture: str
    rows: int
    rows_missing: int
    compared: int
    differ: int
    missing: int
    tokens_equal: bool
    state: str
    first_site: str | None
    first_request: str | None
    first_position: int | None

    @property
    def reproduced(self) -> bool:
        """Whether all of it came again."""
        short = self.differ or self.rows_missing or self.missing
        return self.compared > 0 and not short and self.tokens_equal


class WitnessTry(Record, frozen=True, kw_only=True):
    """One try of the witness pass; `difference`: whether the first difference is there again."""

    candidate: Reproduction
    parent: Reproduction
    difference: bool

    @property
    def reproduced(self) -> bool:
        """Whether both sides came again, and with them the difference."""
        return self.candidate.reproduced and self.parent.reproduced and self.difference


class Witness(Record, frozen=True, kw_only=True):
    """The witness: what leads to the first differences, captured again with payload.

    Attributes:
        ways: the rows.
        tries: in order; the last is the one that reproduced, if any did.
    """

    ways: list[Way]
    tries: list[WitnessTry]

    @property
    def reproduced(self) -> bool:
        """Whether a try reproduced the first pass."""
        return bool(self.tries) and self.tries[-1].reproduced

    @property
    def finished(self) -> bool:
        """Whether both captures of a try finished, so that it says something if it did not reproduce."""
        sides = ((item.candidate, item.parent) for item in self.tries)
        return any(side.state == other.state == "complete" for side, other in sides)


class RunStep(Record, frozen=True, kw_only=True):
    """One capture of the run.

    Attributes:
        step: what it was for.
        capture: its label.
        seconds: that it took.
        resumed: whether an earlier try of this run made it.
        state: "complete" or "incomplete"; one that is incomplete is made anew when the run resumes.
    """

    step: str
    capture: str
    seconds: float
    resumed: bool = False
    state: str = "complete"


class CompiledCode(Record, frozen=True, kw_only=True):
    """Whether the code that was generated for two runs is the same; None where one did not compile."""

    one: str
    other: str
    equal: bool | None


class Probed(Record, frozen=True, kw_only=True):
    """What a probe counted in a capture."""

    capture: str
    probe: Probe


class RunFacts(Record, frozen=True, kw_only=True):
    """What the captures of a run say of each other, beside its diff.

    Attributes:
        verdict, attribution, reasons: as of a diff; the order of reasons is that of their weight. The
            attribution is that of the first pass, whose places the controls recorded.
        parity: strict token parity, of runs without taps where there are any.
        untapped: runs of a source without taps, each with its first: is it reproducible?
        observer: of each source whose runs return the same, the one with taps with the first without: are
            taps neutral?
        repeats: further runs with taps, each with the first of its source.
        kv_blocks: KV cache blocks by capture; `pinned` is to what they were set, if they had differed, and
            `kv_blocks_before` what they were before, by capture.
        compile_cache: "own", "shared" (controls then attribute nothing), or "none" in eager mode.
        compiled: digests of generated code, candidate and controls each against the parent.
        probes: of the first runs with taps.
        witness: None where there is nothing to witness, or none was asked for.
        steps: the captures of the run, in order.
    """

    schema: int = SCHEMA
    kind: str = "run"
    verdict: str
    attribution: str
    reasons: list[Reason]
    parity: Parity
    untapped: list[Repetition]
    observer: list[Repetition]
    repeats: list[Repetition]
    kv_blocks: dict[str, int | None]
    kv_blocks_before: dict[str, int | None]
    pinned: int | None
    compile_cache: str
    compiled: list[CompiledCode]
    probes: list[Probed]
    witness: Witness | None
    steps: list[RunStep]


class RunResult(RunFacts, frozen=True, kw_only=True):
    """What `localize run` found.

    Attributes:
        first: of `diff`.
        differences: known before anything ran; and the KV blocks, where they were set.
        diff: candidate against parent: of the witness pass where that reproduced, else of the first pass.
        first_pass: of the first pass.
    """

    first: Finding | None
    differences: list[Difference]
    diff: Result
    first_pass: Result
