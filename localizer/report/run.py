"""The result of `localize run` as text and as JSON: the verdict, what it rests on, then the diff."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

import msgspec

from localizer.diff import verdict
from localizer.diff.attribution import ALSO_IN_CONTROL
from localizer.diff.result import DIVERGED, INCONCLUSIVE, Difference, TokenFirst
from localizer.diff.runs import (
    LOGPROBS,
    OTHER_LOGPROBS,
    OTHER_ROWS,
    OTHER_TOKENS,
    OWN_BLOCKS,
    SAME,
    UNFINISHED,
    Choice,
    Parity,
    Repetition,
    Reproduction,
    RunFacts,
    RunResult,
    RunStep,
)
from localizer.report import controls, markdown, text, wording
from localizer.report import json as diff_json
from localizer.report.blocks import Block, Bullets, Line, Table
from localizer.report.counts import count
from localizer.report.probes import probed
from localizer.report.safe import clean
from localizer.report.scope import Scope
from localizer.report.scope import scope as diff_scope


def render(style: str, result: RunResult, stream: TextIO) -> None:
    """Write the report as "text", "json" or "markdown"."""
    if style == "json":
        diff_json.write(tree(result), stream)
    elif style == "markdown":
        markdown.write(document(result), stream)
    else:
        text.write(document(result), stream)


def tree(result: RunResult) -> dict[str, Any]:
    """The result as plain objects, with the sentences of its reasons and its scope."""
    bare = msgspec.structs.replace(result, diff=None, first_pass=None)  # diff_json makes these
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(bare))
    for item, reason in zip(plain["reasons"], result.reasons, strict=True):
        item["text"] = wording.reason(reason)
    return {
        **plain,
        "diff": diff_json.tree(result.diff),
        "first_pass": diff_json.tree(result.first_pass),
        "scope": msgspec.to_builtins(scope(result)),
    }


def document(result: RunResult) -> Iterator[Block]:
    """The report as blocks, top to bottom."""
    yield Line(headline(result), "verdict")
    yield from text.answer(result.diff)
    if result.attribution != result.diff.attribution:  # the witness saw what controls did not record
        yield Line("At the first difference of the first pass:")
        yield from controls.line(result.first_pass)
    yield from text.differing([*_own_blocks(result), *result.diff.differences])
    yield from _parity(result.parity)
    yield Line("What the runs say of each other", "heading")
    yield Bullets([*said(result), *_probes(result)])
    yield from witnessed(result)
    yield from text.body(result.diff)
    yield Line("Captures of this run", "heading")
    rows = [[item.step, clean(item.capture), f"{item.seconds:.0f}", _state(item)] for item in result.steps]
    yield Table(["for", "capture", "seconds", ""], rows, frozenset({2}))
    yield from text.limits(scope(result))


def skipped(result: RunResult) -> str:
    """Why a commit is neither good nor bad, for whoever reads along while git bisects."""
    if result.verdict == DIVERGED:
        why = (
            "the parent differs from itself there too"
            if result.attribution == ALSO_IN_CONTROL
            else "no control shows whose the difference is"
        )
    elif result.verdict == INCONCLUSIVE:
        why = "the answer is inconclusive"
    else:
        why = "nothing differs, but a source does not repeat itself"
    return f"This commit is passed over (exit code 125): {why}."


def _own_blocks(result: RunResult) -> list[Difference]:
    """That the sources had other numbers of KV blocks by themselves, which those compared do not say."""
    return [item for item in result.differences if item.setting == OWN_BLOCKS]


def _state(step: RunStep) -> str:
    made = "made before" if step.resumed else ""
    return ", ".join(filter(None, [made, "" if step.state == "complete" else "did not finish"]))


def headline(result: RunResult) -> str:
    """The verdict in one line."""
    if result.verdict == result.diff.verdict != INCONCLUSIVE:
        return wording.headline(result.diff)
    why = "; ".join(wording.reason(reason) for reason in result.reasons[:1]) or "see below"
    if result.diff.verdict == DIVERGED:
        return f"{result.verdict}: {why} (what was captured is {wording.headline(result.diff)})"
    return f"{result.verdict}: {why}"


def _parity(found: Parity) -> Iterator[Block]:
    how = "with taps" if found.tapped else "without taps"
    names = f"{clean(found.captures.candidate)} against {clean(found.captures.parent)}"
    yield Line(f"Token parity, {how}: {names}", "heading")
    yield Line(wording.tokens(found.tokens))
    equal = "prompts are equal" if found.tokens.prompts_equal else "prompts are DIFFERENT"
    yield Line("; ".join(filter(None, [equal, wording.repeats(found.tokens)])))
    if found.tokens.positions_differ:
        rows = [
            [
                *(str(item.round), str(item.batch)),
                *(f"{item.requests_differ:,} of {item.requests:,}",),
                *(f"{item.positions_differ:,} of {item.positions:,}",),
            ]
            for item in found.rounds
        ]
        loud = frozenset(i for i, item in enumerate(found.rounds) if item.requests_differ)
        header = ["round", "batch", "requests differ", "positions differ"]
        yield Table(header, rows, frozenset({0, 1, 2, 3}), loud)
    if found.logprobs_differ:
        of = count(found.logprobs_compared or 0, "position")
        yield Line(f"log probabilities differ at {found.logprobs_differ:,} of {of}")
    first = found.first
    if first is not None:
        where = f"request {clean(first.request)}, position {first.position} (output {first.output_index})"
        told = "; ".join(
            f"{side} {_choice(choice)}"
            for side, choice in (("candidate", first.candidate), ("parent", first.parent))
        )
        of = " (log probabilities)" if first.measured == LOGPROBS else ""
        yield Line(f"first different token: {where}: {told}{of}")


def _choice(choice: Choice) -> str:
    token = "none" if choice.token is None else str(choice.token)
    return f"chose {token}" + (f" of {wording.top(choice.top)}" if choice.top is not None else "")


def said(result: RunFacts) -> Iterator[str]:
    """What is to be done, and what the runs say of each other: repeats, observer, caches, compiled code."""
    yield from _to_do(result)
    yield from _steadiness(result)
    yield from _cache(result)
    yield from _compiled(result)


def _to_do(result: RunFacts) -> Iterator[str]:
    """Reasons after which something is to be done."""
    codes = verdict.RUN_UNFINISHED, verdict.WITNESS_UNFINISHED, verdict.NOT_PINNED
    yield from (wording.reason(item) for item in result.reasons if item.code in codes)


def _steadiness(result: RunFacts) -> Iterator[str]:
    """Sentences on reproducibility, observer and repeats."""
    for item in result.untapped:
        if item.differs == SAME:
            yield f"the {item.source} is reproducible: {_pair(item)}, without taps, returned {_same(item)}"
        elif item.different:
            both = f"{_pair(item)}, without taps,"
            yield f"the {item.source} is NOT reproducible: {both} {_differ(item)}"
        else:
            yield f"whether the {item.source} is reproducible cannot be told: {_half(item)}"
    if not result.untapped:
        yield "whether a source is reproducible was not looked at: no two runs without taps were made"
    for item in result.observer:
        both = f"{_pair(item)}, with and without,"
        if item.differs == SAME:
            yield f"taps are neutral on the {item.source}: {both} returned {_same(item)}"
        elif item.different:
            yield f"taps are NOT neutral on the {item.source}: {both} {_differ(item)}"
        else:
            yield f"whether taps are neutral on the {item.source} cannot be told: {_half(item)}"
    unsteady = {item.source for item in (*result.untapped, *result.repeats) if item.returned_otherwise}
    for source in sorted(unsteady):
        yield f"whether taps are neutral on the {source} cannot be told, since it does not repeat itself"
    if not result.observer and not unsteady:
        yield "whether taps are neutral was not looked at: no run without taps was made"
    for item in result.repeats:
        what = f"returned {_same(item)}" if item.differs == SAME else _differ(item)
        yield f"with taps, two runs of the {item.source}, {_pair(item)}, {what}"


def _half(item: Repetition) -> str:
    return f"of {_pair(item)} one did not finish"


def _pair(item: Repetition) -> str:
    return f"{clean(item.one)} and {clean(item.other)}"


def _same(item: Repetition) -> str:
    probabilities = " and log probabilities" if item.logprobs_compared else ""
    return f"equal tokens{probabilities} ({count(item.requests, 'request')})"


def _differ(item: Repetition) -> str:
    if item.differs == UNFINISHED:
        return "cannot be compared: one of them did not finish"
    if item.differs == OTHER_ROWS and not item.pairs_differ:
        rows = count(item.proposals_differ or 0, "draft row")
        return f"returned {_same(item)}, but proposed other tokens from {rows}"
    if item.differs == OTHER_ROWS:
        return (
            f"returned {_same(item)}, but differ at {item.pairs_differ or 0:,} of "
            f"{count(item.pairs_compared or 0, 'row × site pair')}"
        )
    if item.differs == OTHER_TOKENS:
        return (
            f"differ in {item.requests_differ:,} of {count(item.requests, 'request')} at "
            f"{count(item.positions_differ, 'position')}, first at {_token(item.first)}"
        )
    assert item.differs == OTHER_LOGPROBS
    return (
        f"returned equal tokens, but other log probabilities at {item.logprobs_differ or 0:,} of "
        f"{count(item.logprobs_compared or 0, 'position')}, first at {_token(item.first_logprob)}"
    )


def _token(first: TokenFirst | None) -> str:
    return (
        "no single token" if first is None else f"request {clean(first.request)}, position {first.position}"
    )


def _cache(result: RunFacts) -> Iterator[str]:
    blocks = set(result.kv_blocks.values())
    if result.pinned is not None:
        own = ", ".join(
            f"{_blocks(number)} in {clean(label)}" for label, number in result.kv_blocks_before.items()
        )
        made = (
            f"all runs were made with {result.pinned:,}"
            if blocks == {result.pinned}
            else (
                f"they were to be {result.pinned:,}, and are "
                + ", ".join(f"{_blocks(number)} in {clean(it)}" for it, number in result.kv_blocks.items())
            )
        )
        yield f"KV cache blocks differed ({own}); {made} (num_gpu_blocks_override)"
    elif len(blocks) == 1:
        yield f"all runs had {_blocks(blocks.pop())} KV cache blocks"
    else:
        numbers = sorted(blocks, key=lambda number: number or 0)
        yield f"KV cache blocks are {', '.join(map(_blocks, numbers))}"


def _blocks(number: int | None) -> str:
    return "an unknown number" if number is None else f"{number:,}"


def _compiled(result: RunFacts) -> Iterator[str]:
    if result.compile_cache == "shared":
        yield (
            "the compile cache was shared: runs of the parent take each other's code, the candidate does "
            "not, so that controls attribute nothing"
        )
    for item in result.compiled:
        if item.equal is not None:
            what = "the same code was generated" if item.equal else "DIFFERENT code was generated"
            yield f"{what} for {clean(item.one)} and {clean(item.other)}"


def _probes(result: RunFacts) -> Iterator[str]:
    for item in result.probes:
        yield f"probe in {clean(item.capture)}: {probed(item.probe)}"


def witnessed(result: RunFacts) -> Iterator[Block]:
    """What came again in the witness pass; nothing where there was none."""
    found = result.witness
    if found is None:
        return
    yield Line("Witness", "heading")
    ways = [
        f"request {clean(way.request)} up to position {way.position} "
        f"({'the first different token' if way.why == 'token' else 'the first differing row'})"
        for way in found.ways
    ]
    yield Line(f"captured again with payload at all sites: {'; '.join(ways)}")
    lines = []
    for number, item in enumerate(found.tries, 1):
        if not item.difference:
            lines.append(f"attempt {number}: the first difference is NOT there again")
        for side, again in (("candidate", item.candidate), ("parent", item.parent)):
            lines.append(f"attempt {number}, {side} {clean(again.capture)}: {_reproduction(again)}")
    yield Bullets(lines)


def _reproduction(again: Reproduction) -> str:
    if again.reproduced:
        return (
            f"reproduced: {count(again.compared, 'row × site pair')} of {count(again.rows, 'row')} "
            "are those of the first pass"
        )
    said = []
    if again.differ:
        said.append(
            f"{again.differ:,} of {count(again.compared, 'row × site pair')} differ from the first pass, "
            f"first at {clean(again.first_site or '')}, request {clean(again.first_request or '')}, "
            f"position {again.first_position}"
        )
    if again.rows_missing:
        said.append(f"{count(again.rows_missing, 'row')} of the first pass did not come again")
    if not again.tokens_equal:
        said.append("other tokens were returned on the way")
    if again.missing:
        said.append(f"{count(again.missing, 'row × site pair')} of the first pass are missing")
    if again.state != "complete":
        said.append("it did not finish")
    if not again.compared:
        said.append("nothing could be compared with the first pass")
    return f"NOT reproduced: {'; '.join(said)}"


def scope(result: RunResult) -> Scope:
    """What the run establishes and what it does not: that of its diff, and of what the runs say."""
    found = diff_scope(result.diff)
    established, open_questions = list(found.establishes), list(found.does_not_establish)
    for item in result.observer:
        if item.differs == SAME:
            established.append(
                f"Taps did not change what the {item.source} returned, as far as tokens"
                f"{' and log probabilities' if item.logprobs_compared else ''} tell."
            )
    if result.witness is not None and result.witness.reproduced:
        established.append("What leads to the first difference came again, byte for byte, in a second pass.")
    if result.pinned is not None:
        open_questions.append(
            "What the sources do with the numbers of KV cache blocks that they have by themselves: all runs "
            f"were to have {result.pinned:,}."
        )
    if len({item.source for item in result.observer if item.differs != UNFINISHED}) < 2:
        open_questions.append("Whether taps change what both sources compute: see what the runs say.")
    open_questions.append(
        "How the sources behave under other loads: rounds are queued whole before their first step; "
        "vllm serve and AsyncLLM were not run."
    )
    return Scope(establishes=established, does_not_establish=open_questions)
