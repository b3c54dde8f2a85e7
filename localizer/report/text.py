"""A result as plain language: the verdict first, then the evidence, then its limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TextIO

from localizer.diff.places import place
from localizer.diff.result import Difference, Result
from localizer.report import (
    controls,
    evidence,
    explain,
    rows,
    speculation,
    summary,
    within,
    wording,
)
from localizer.report.blocks import MISSING, Block, Bullets, Line, Table
from localizer.report.counts import count
from localizer.report.safe import clean
from localizer.report.scope import Scope, scope

SETTINGS_SHOWN = 12
"""Differing settings that are listed; the JSON result has all."""

WIDEST_VALUE = 40
"""Characters of a setting's value that are shown."""

NAMES_SHOWN = 3


def render(result: Result, stream: TextIO) -> None:
    """Write the report of a diff."""
    write(document(result), stream)


def write(blocks: Iterable[Block], stream: TextIO) -> None:
    """Write blocks: coloured and wrapped on a terminal, plain elsewhere."""
    if stream.isatty():
        from localizer.report import terminal  # rich costs more than the rest of a small diff

        terminal.write(list(blocks), stream)
    else:
        stream.writelines(line.rstrip() + "\n" for block in blocks for line in plain(block))


def document(result: Result) -> Iterator[Block]:
    """The report as blocks, top to bottom."""
    yield from explain.blocks(result)
    yield from within.document(result) if within.is_within(result) else _between(result)
    yield from limits(scope(result))


def limits(found: Scope) -> Iterator[Block]:
    """What a result establishes and what it does not."""
    yield Line("This result establishes", "heading")
    yield Bullets(found.establishes or ["nothing."])
    yield Line("It does not establish", "heading")
    yield Bullets(found.does_not_establish)


def _between(result: Result) -> Iterator[Block]:
    """The report of two captures, but for its scope."""
    yield Line(wording.headline(result), "verdict")
    yield from answer(result)
    yield from differing(result.differences)
    yield from body(result)


def answer(result: Result) -> Iterator[Block]:
    """What the controls say of the first difference, and that difference in a sentence."""
    yield from controls.line(result)
    if result.first is not None:
        yield Line(summary.sentence(result))


def body(result: Result) -> Iterator[Block]:
    """The evidence, the captures and what of them was compared."""
    yield Line("Evidence", "heading")
    yield from finding(result)
    yield from evidence.target(result)
    yield Line(f"tokens: {wording.tokens(result.tokens)}")
    yield Line("; ".join(filter(None, [_prompts(result), wording.repeats(result.tokens)])))
    if result.speculation is not None:
        yield Line(f"speculation: {speculation.summary(result)}")
    yield from evidence.patterns_and_reasons(result, "requests")
    yield Line("Captures", "heading")
    yield captures(result)
    yield from controls.blocks(result)
    yield from rows.blocks(result)
    yield from evidence.sites_table(result)
    yield Line("Coverage", "heading")
    yield Bullets(list(coverage(result)))


def finding(result: Result) -> Iterator[Block]:
    """The first difference in full; nothing where no site differs."""
    first = result.first
    if first is None:
        return
    yield Line(wording.blame(first))
    if code := wording.code(first.segment):
        yield Line(code)
    yield Line(wording.elements(first))
    if first.parent_request != first.request:
        theirs = f"request {clean(first.parent_request)}, step {first.parent_step}"
        yield Line(f"In the parent the row is of {theirs}.")
    if first.logits is not None:
        yield Line(f"Highest logits: {wording.logits(first.logits)}")
    if place(first.site).draft and (other := speculation.other_drafts(result)):
        yield Line(other)


def plain(block: Block) -> Iterator[str]:
    """A block as lines without colour or wrapping."""
    if isinstance(block, Line):
        if block.role == "heading":
            yield ""
        yield block.text
    elif isinstance(block, Bullets):
        yield from (f"  - {item}" for item in block.items)
    else:
        rows = [block.header, *block.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(block.header))]
        for row in rows:
            cells = [
                cell.rjust(width) if column in block.right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            yield "  " + "  ".join(cells)


def _prompts(result: Result) -> str:
    equal = "prompts are equal" if result.tokens.prompts_equal else "prompts are DIFFERENT"
    if result.workloads_equal:
        return equal
    return f"{equal}, the workloads are not: requests are paired by equal prompt, rows by prefix alone"


def captures(result: Result) -> Table:
    """Which two captures were read."""
    both = (("candidate", result.captures.candidate), ("parent", result.captures.parent))
    rows = [[side, clean(it.label), clean(it.vllm), it.state, clean(it.created)] for side, it in both]
    header = ["", "capture", "vLLM", "state", "created"]
    if all(it.path.endswith(it.label) for _, it in both):
        return Table(header, rows)
    return Table([*header, "path"], [[*row, clean(it.path)] for row, (_, it) in zip(rows, both, strict=True)])


def differing(
    differences: list[Difference], shown: int = SETTINGS_SHOWN, widest: int = WIDEST_VALUE
) -> Iterator[Block]:
    """What else differs between the two captures: it often is the answer."""
    if not differences:
        yield Line("parity: nothing else that both captures record differs")
        return
    yield Line("What else differs", "heading")
    rows = [
        [clean(item.setting), _value(item.candidate, widest), _value(item.parent, widest)]
        for item in differences[:shown]
    ]
    yield Table(["setting", "candidate", "parent"], rows, values=frozenset({0, 1, 2}))
    if len(differences) > shown:
        yield Line(f"  … and {len(differences) - shown} more; --format json lists all")


def _value(value: object, widest: int) -> str:
    return MISSING if value is None else clean(str(value), widest)


def coverage(result: Result) -> Iterator[str]:
    """What of the captures was compared, in sentences."""
    cover = result.coverage
    rows, pairs = cover.rows, cover.pairs
    yield (
        f"{count(rows.paired, 'row')} paired by {rows.paired_by.replace('+', ' and ')}, "
        f"of {rows.candidate:,} in the candidate and {rows.parent:,} in the parent"
    )
    past = rows.past_token_difference
    if past.candidate or past.parent:
        yield f"unpaired past a different token: {past.candidate:,} candidate and {past.parent:,} parent rows"
    others = rows.without_counterpart
    if others.candidate or others.parent:
        sides = _kinds("candidate", others.candidate), _kinds("parent", others.parent)
        yield f"unpaired otherwise: {' and '.join(sides)} rows"
    padding = rows.draft_padding
    if padding.candidate or padding.parent:
        yield f"padding of drafts: {padding.candidate:,} candidate and {padding.parent:,} parent rows"
    unknown = rows.without_prefix
    if unknown.candidate or unknown.parent:
        yield f"of unknown prefix: {unknown.candidate:,} candidate and {unknown.parent:,} parent rows"
    yield f"{count(pairs.compared, 'row × site pair')} compared, {pairs.differ:,} differ"
    if cover.stored is not None:
        yield f"compared byte for byte too: {wording.stored(cover.stored)}"
    if pairs.missing.candidate or pairs.missing.parent:
        missing = pairs.missing
        yield f"missing pairs: {missing.candidate:,} in the candidate, {missing.parent:,} in the parent"
    for side, names in (("candidate", cover.sites.candidate_only), ("parent", cover.sites.parent_only)):
        if names:
            shown = [clean(name) for name in names[:NAMES_SHOWN]] + ["…"] * (len(names) > NAMES_SHOWN)
            yield f"only in the {side}: {count(len(names), 'site')} ({', '.join(shown)})"
    if cover.sites.not_comparable:
        algorithms = {
            name for both in cover.sites.not_comparable.values() for name in (both.candidate, both.parent)
        }
        yield (
            f"not comparable: {count(len(cover.sites.not_comparable), 'site')}, "
            f"whose digests are of {' and '.join(map(clean, sorted(algorithms)))}"
        )
    if cover.sites.split:
        yield f"not comparable: {count(len(cover.sites.split), 'site')} {wording.split(cover.sites.split)}"
    if cover.sites.not_applicable:
        yield f"not there, or not to be seen in these runs: {count(len(cover.sites.not_applicable), 'site')}"
    layers = {clean(cover.layers.candidate), clean(cover.layers.parent)}
    yield f"attention layers recorded: {' and '.join(sorted(layers))}"


def _kinds(side: str, rows: dict[str, int]) -> str:
    return f"{sum(rows.values()):,} {side}{speculation.kinds(rows)}"
