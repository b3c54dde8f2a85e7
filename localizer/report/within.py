"""The report of one capture compared with itself: a later row against the first earlier one."""

from __future__ import annotations

from collections.abc import Iterator

from localizer.diff.align import WITHIN
from localizer.diff.result import Result
from localizer.report import evidence, summary, tolerance, wording
from localizer.report import rows as row_table
from localizer.report.blocks import Block, Bullets, Line, Table
from localizer.report.counts import count
from localizer.report.safe import clean
from localizer.report.speculation import kinds

SIDES = ("later", "earlier")
"""What the two rows of a pair are called."""


def is_within(result: Result) -> bool:
    """Whether a result is of one capture compared with itself."""
    return result.coverage.rows.paired_by == WITHIN


def document(result: Result) -> Iterator[Block]:
    """The report as blocks, top to bottom, but for its scope."""
    first = result.first
    yield Line(wording.headline(result), "verdict")
    if first is not None:
        later = f"request {clean(first.request)} (step {first.step}, {clean(first.kind)})"
        earlier = f"request {clean(first.parent_request)} (step {first.parent_step})"
        yield Line(
            f"Within {clean(result.captures.candidate.label)}: the row of {later} differs from the first "
            f"earlier row of equal prefix, of {earlier}."
        )
        yield Line(summary.sentence(result))
        yield Line(wording.blame(first))
        if code := wording.code(first.segment, "its"):
            yield Line(code)
        yield Line(wording.elements(first, SIDES))
        if first.logits is not None:
            yield Line(f"Highest logits: {wording.logits(first.logits, SIDES)}")
    yield from evidence.target(result)
    yield Line(f"tokens of equal prompts: {_tokens(result)}")
    yield from evidence.patterns_and_reasons(result, "later requests", SIDES)
    yield Line("Capture", "heading")
    it = result.captures.candidate
    yield Table(
        ["capture", "vLLM", "state", "created", "path"],
        [[clean(it.label), clean(it.vllm), it.state, clean(it.created), clean(it.path)]],
    )
    yield from row_table.blocks(result)
    yield from evidence.sites_table(result)
    yield Line("Coverage", "heading")
    yield Bullets(list(_coverage(result)))


def _tokens(result: Result) -> str:
    if not result.tokens.requests:
        return "no prompt was asked twice"
    return wording.tokens(result.tokens)


def _coverage(result: Result) -> Iterator[str]:
    rows, pairs = result.coverage.rows, result.coverage.pairs
    yield (
        f"{count(rows.paired, 'row')} of {rows.candidate:,} paired with the first earlier one "
        "of equal prefix, whatever its request"
    )
    alone = rows.unpaired.candidate - rows.draft_padding.candidate - rows.without_prefix.candidate
    yield f"{count(alone, 'row')} with none before {'it' if alone == 1 else 'them'}"
    if rows.draft_padding.candidate:
        yield f"padding of drafts: {count(rows.draft_padding.candidate, 'row')}"
    if rows.without_prefix.candidate:
        yield f"of unknown prefix: {count(rows.without_prefix.candidate, 'row')}"
    if result.speculation is not None:
        found = result.speculation.candidate
        verified = {"verify-accepted": found.accepted_paired, "verify-rejected": found.rejected_paired}
        yield f"rows of verification among the later ones:{kinds(verified)}"
    yield f"{count(pairs.compared, 'row × site pair')} compared, {pairs.differ:,} differ"
    missing = max(pairs.missing.candidate, pairs.missing.parent)
    if missing:
        yield f"at least {count(missing, 'pair')} missing"
    yield f"attention layers recorded: {clean(result.coverage.layers.candidate)}"


def establishes(result: Result) -> list[str]:
    """What the result shows."""
    pairs, tokens, first, said = result.coverage.pairs, result.tokens, result.first, []
    if pairs.compared:
        said.append(
            f"{count(pairs.compared, 'row × site pair')} of one run, asked to compute the same in other "
            "requests, batches or steps, compared by xxh3-128 digest: "
            f"{pairs.compared - pairs.differ:,} equal, {pairs.differ:,} different."
        )
    if first is not None:
        said.append(
            "The source is not consistent with itself: "
            f"two rows of equal prefix differ at {clean(first.site)}."
        )
    if tokens.requests:
        same = tokens.requests - tokens.requests_differ
        said.append(
            f"{same:,} of {count(tokens.requests, 'repeated request')} returned the tokens of the first "
            f"request with the same prompt{' as far as both go' if tokens.requests_unfinished else ''}."
        )
    return [*said, *tolerance.establishes(result)]


def does_not_establish(result: Result) -> list[str]:
    """What the result leaves open."""
    rows, cover, said = result.coverage.rows, result.coverage, []
    if result.first is not None:
        said.append(
            "Whether that is a fault: kernels may round otherwise in batches of another size, in chunks "
            "and in verification."
        )
    alone = rows.unpaired.candidate
    if alone:
        said.append(f"Anything about {count(alone, 'row')} without an earlier one of equal prefix.")
    if cover.layers.candidate != "all":
        said.append(f"Anything about layers that were not recorded ({clean(cover.layers.candidate)} were).")
    if cover.pairs.missing.candidate or cover.pairs.missing.parent:
        said.append("Anything about pairs that should have been recorded and were not.")
    said += tolerance.does_not_establish(result)
    said.append("That another run of the source gives the same bytes: this is one run.")
    said.append("KV cache contents and block tables: they were not compared.")
    said.append("Quality of the output or performance.")
    return said
