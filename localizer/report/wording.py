"""The sentences in which a result is told."""

from __future__ import annotations

from collections.abc import Mapping

from localizer.diff import localize, verdict
from localizer.diff.places import (
    ATTENTION,
    FINAL,
    INPUTS,
    INSIDE,
    LM_HEAD,
    MODULE,
    OTHER,
    OUTPUT,
    QKV,
    ROUTING,
    SAMPLER,
    Place,
    place,
)
from localizer.diff.result import (
    CANDIDATE,
    CAPTURE,
    DIVERGED,
    IDENTICAL,
    PARENT,
    Both,
    Finding,
    Logits,
    Reason,
    Result,
    Segment,
    StoredCoverage,
    Tokens,
    TopTwo,
)
from localizer.report import speculation
from localizer.report.counts import count
from localizer.report.safe import clean
from localizer.wire import ranks

_PLACES = {
    FINAL: "final hidden states",
    LM_HEAD: "logits",
    SAMPLER: "sampled token",
}


def site(where: Place) -> str:
    """A site in words: `the query of layer 18`, `the query[0/2] of layer 3`, `the logits on rank 1`."""
    held = ranks.parse(where.name)
    heads = f"[{held.index}/{held.of}]" if held.of > 1 else ""
    of = f" of {held.ranks}" if held.ranks else ""
    return _site(where, heads) + ("" if held.rank is None else f" on rank {held.rank}{of}")


def split(sites: Mapping[str, Both[int]]) -> str:
    """Why sites that both captures hold in parts are not comparable, behind their number."""
    parts = {(both.candidate, both.parent) for both in sites.values()}
    told = [f"{_ranges(one)} against {_ranges(other)}" for one, other in sorted(parts)]
    return f"that candidate and parent split otherwise over their workers ({', '.join(told)})"


def _ranges(of: int) -> str:
    return {0: "parts of each rank", 1: "all heads"}.get(of, f"{of} ranges of heads")


def _site(where: Place, heads: str) -> str:
    """A site in words, with the range of heads that it holds behind its part."""
    whose = "the draft's" if where.draft else "the"
    if where.stage == INPUTS:
        return f"{whose} {'input ids' if where.part == 'input_ids' else clean(where.part)}"
    if where.stage in (QKV, ROUTING, OUTPUT):
        if _of_attention(where):
            return (
                f"the {'attention output' if where.stage == OUTPUT else _plain(where.part)}{heads} "
                f"of {layer(where)}"
            )
        op = clean(where.layer.rpartition(".")[2])
        return f"the {_plain(where.part)}{heads} of {op} of {layer(where)}"
    if where.stage == MODULE:
        return f"the {_plain(where.part) or 'output'} of {clean(where.layer)}"
    if where.stage == INSIDE:
        return f"the auxiliary hidden states {clean(where.part)}"
    return f"{whose} {_PLACES[where.stage]}" if where.stage in _PLACES else clean(where.name)


def _of_attention(where: Place) -> bool:
    """Whether a site is one of attention: an output is, where its layer is called so, as vLLM does."""
    return "attn" in where.layer.rpartition(".")[2] if where.stage == OUTPUT else where.op == ATTENTION


def _plain(part: str) -> str:
    return clean(part.replace("_", " "))


def layer(where: Place) -> str:
    """`layer 18`, `the draft's layer 8`, or the layer's name where that holds no number."""
    if where.number is None:
        return clean(where.layer)
    return f"the draft's layer {where.number}" if where.draft else f"layer {where.number}"


_OPS = {
    localize.IN_ROUTER: "the router, which chooses the experts.",
    localize.IN_EXPERTS: "the experts, or how what they give is combined.",
    localize.IN_STATE_SPACE: "the state-space op, its metadata or the state that it carried on.",
}
"""What is at fault where the op of a layer is no attention."""


def headline(result: Result) -> str:
    """The verdict in one line."""
    if result.verdict == DIVERGED:
        first, token = result.first, result.tokens.first
        if first is not None:
            only = speculation.only_draft(result)
            return f"diverged: {only}{'; ' if only else ''}first at {clean(first.site)}, {row(first)}"
        if token is not None:
            where = f"request {clean(token.request)}, position {token.position} (output {token.output_index})"
            return f"diverged: only tokens differ, first at {where}; {no_site(result)}"
        return f"diverged: {speculation.only_proposals(result)}"
    if result.verdict == IDENTICAL:
        pairs = count(result.coverage.pairs.compared, "compared row × site pair")
        return f"identical: every one of {pairs} has equal bytes"
    return f"inconclusive: {'; '.join(reason(item) for item in result.reasons[:1])}"


def row(first: Finding) -> str:
    """Where a finding lies: request, position, step, and the draft step of a draft's row."""
    draft = f", {clean(first.kind.replace('draft-', 'draft step '))}" if place(first.site).draft else ""
    return f"request {clean(first.request)}, position {first.position} (step {first.step}{draft})"


def no_site(result: Result) -> str:
    """Why no site is named although tokens differ."""
    return "no compared site differs" if result.coverage.pairs.compared else "no site was compared"


def reason(item: Reason) -> str:
    """A reason in one sentence, without a full stop."""
    who = f"the {item.source}" if item.source else "neither side"
    if item.code == verdict.INCOMPLETE:
        return f"{who} is incomplete: {clean(item.detail).rstrip('.')}"
    sentences = {
        verdict.DIFFERENT_MODEL: "the captures ran different models (their files differ): nothing compared",
        verdict.NO_COMMON_PREFIX: "the captures have no common prefix: no row was asked to compute the same",
        verdict.MISSING: f"{who} lacks {count(item.count, 'row × site pair')} that it should have recorded",
        verdict.NO_ROWS: f"{who} recorded no rows, so no tensor was compared",
        verdict.NOTHING_COMPARED: "no row of any site is held by both captures, so no tensor was compared",
        verdict.SAME_CAPTURE: "candidate and parent are one capture: nothing ran twice",
        verdict.NOTHING_REPEATS: "no prompt and no prefix occurs twice in the capture: nothing to compare",
        verdict.SOURCE_UNSTEADY: f"{who} is not reproducible: two equal runs of it differ",
        verdict.NOT_NEUTRAL: f"the observer is not neutral: with taps {who} returned something else"
        if item.count
        else f"with taps {who} returned something else, by the observer or by chance: one run had none",
        verdict.OUTPUTS_DIFFER: "returned tokens or log probabilities differ, though no compared row does",
        verdict.NOT_REPRODUCED: "the witness was not reproduced: what leads to the first difference came "
        f"out otherwise in {count(item.count, 'attempt')}",
        verdict.RUN_UNFINISHED: f"a run of {who} did not finish ({clean(item.detail)}): the same command "
        "makes it anew and keeps the others",
        verdict.WITNESS_UNFINISHED: "no witness run finished, so that what leads to the first difference was "
        "not seen again: the same command makes them anew and keeps the others",
        verdict.NOT_PINNED: f"{who} did not take the number of KV cache blocks that was set "
        f"({clean(item.detail)} blocks, first of {count(item.count, 'run')}): choose kv_cache_memory_bytes "
        "so that both sources have as many",
        verdict.NOT_REPRODUCIBLE: f"{who} does not repeat itself: a later pass returned other tokens",
    }
    if item.source == CAPTURE:
        sentences[verdict.MISSING] = f"{who} lacks rows that it should have recorded"
        sentences[verdict.NOTHING_COMPARED] = "no row of any site has an earlier one of equal prefix"
    return sentences.get(item.code, clean(item.code))


def blame(finding: Finding) -> str:
    """What the segment holds, in one sentence."""
    before = place(finding.site)
    after = place(finding.segment.after) if finding.segment.after is not None else None
    if finding.blame == localize.WRONG_INPUTS:
        what = "draft step" if before.draft else "forward pass"
        return f"The inputs of the {what} differ already: {site(before)}, although the prefix is the same."
    if after is None:
        return (
            f"{_capital(site(before))} differs, and nothing upstream of it was compared on that row: "
            f"the difference may have entered anywhere before it.{speculation.fed_by(finding)}"
        )
    differs = f"{_capital(site(before))} {_verb(before, 'differs', 'differ')}"
    equal = f"{differs}, {site(after)} {_verb(after)} equal: "
    if finding.blame == localize.IN_AUXILIARY:
        return (
            f"{equal}anything from the embedding up to where the former are taken may be at fault. They are "
            "taken between two layers (which ones, EAGLE3's configuration says) and seen only when the "
            "forward pass returns, so no attention site is known to lie right before them."
        )
    if finding.blame == localize.DRAFT_ENTRY:
        return f"{equal}{_either(_pieces(after, before, finding))}.{speculation.fed_by(finding)}"
    if finding.blame == localize.IN_ATTENTION:
        if after.part == "value" and not finding.unobserved.sites:
            equal = f"{differs}, its query, key and value are equal: "
        return equal + "the attention kernel, its metadata or the KV contents it read." + _attention(finding)
    if finding.blame in _OPS:
        return equal + _OPS[finding.blame] + _not_compared(finding)
    what = f"the code between {site(after)} and {site(before)}"
    inside = _pieces(after, before, finding)
    return f"{equal}{what}{': ' if inside else ''}{_either(inside)}."


def code(segment: Segment, whose: str | None = None) -> str:
    """Where in vLLM's source the two ends of a segment are, in one sentence; empty where nobody knows.

    `whose` names the source, as in "the candidate's"; without it that is the one that the segment names.
    """
    ends = [clean(place) for place in (segment.after_code, segment.before_code) if place]
    if not segment.before_code:
        return ""
    source = "In " + (whose or f"the {segment.code_of}'s") + " source"
    if len(ends) < 2:
        return f"{source} it is before {ends[0]}."
    if ends[0] == ends[1]:
        return f"{source} both of its ends are at {ends[0]}."
    return f"{source} it lies between {ends[0]} and {ends[1]}."


def _attention(finding: Finding) -> str:
    """What is known of the key and value rows that an attention output read, and of its own inputs."""
    text = _not_compared(finding)
    rows = finding.key_value
    if rows is None or not rows.positions:
        return text
    earlier = count(rows.positions, "earlier position")
    if rows.differ:
        return f"{text} Key or value rows as written differ at {rows.differ:,} of {earlier} of that request."
    if rows.equal == rows.positions:
        return f"{text} Key and value rows as written are equal at all {earlier} of that request."
    if rows.equal:
        return (
            f"{text} Key and value rows as written are equal at {rows.equal:,} of {earlier} of that request; "
            f"the other {rows.not_compared:,} were not compared."
        )
    return f"{text} Key and value rows of the {earlier} of that request were not compared."


def _not_compared(finding: Finding) -> str:
    """Sites inside the segment that were not compared."""
    names = ", ".join(clean(name) for name in finding.unobserved.sites)
    return (
        f" Not compared on that row, so the code that makes them lies inside too: {names}." if names else ""
    )


def _pieces(after: Place, before: Place, finding: Finding) -> list[str]:
    """What a segment holds in a decoder of the usual build, in execution order."""
    inside = finding.unobserved
    if not (_usual(after) and _usual(before)):
        return _between(after, before, finding)
    pieces = []
    if after.stage == INPUTS:
        pieces.append("the draft's embedding" if before.draft else "the embedding")
    if entry := speculation.takes_in(finding):
        pieces.append(entry)
    if after.stage == QKV:
        pieces.append(f"the attention of {layer(after)}")
    if after.stage in (QKV, OUTPUT) and before.stage != OTHER and after.layer != before.layer:
        pieces.append(f"o_proj, the norms and the MLP of {layer(after)}")
    if inside.layers:
        whose = "the draft's " if before.draft else ""
        pieces.append(f"{whose}{_layers(inside.layers)}, of which no site was compared on that row")
    if inside.later_layers:
        behind = "any layer" if after.stage == INPUTS else f"any layer after {layer(after)}"
        pieces.append(f"{behind} that was not recorded")
    if before.stage in (QKV, OUTPUT) and after.layer != before.layer:
        first = "the first norm, " if after.stage == INPUTS and not inside.layers else ""
        pieces.append(f"{first}the qkv projection, q/k norm and rotary embedding of {layer(before)}")
    if before.stage == OUTPUT:
        pieces.append(f"the attention of {layer(before)}")
    if before.stage in (FINAL, LM_HEAD, SAMPLER) and after.stage in (INPUTS, QKV, OUTPUT):
        pieces.append("the final norm")
    if before.stage in (LM_HEAD, SAMPLER) and after.stage != LM_HEAD:
        pieces.append("lm_head with its gather, scale or soft cap")
    if before.stage == SAMPLER:
        sampler = "rejection sampler" if finding.kind.startswith("verify") else "sampler"
        pieces.append(f"the logits processors, penalties and the {sampler}")
    return pieces


def _usual(where: Place) -> bool:
    """Whether a site is one of those around which every decoder is built alike."""
    return _of_attention(where) if where.stage in (QKV, OUTPUT) else where.stage not in (ROUTING, MODULE)


def _between(after: Place, before: Place, finding: Finding) -> list[str]:
    """What is known of a segment that ends or starts at a module, or at an op that is no attention."""
    inside = finding.unobserved
    pieces = [f"{_layers(inside.layers)}, of which no site was compared on that row"] if inside.layers else []
    if inside.later_layers:
        pieces.append(f"any layer after {layer(after)} that was not recorded")
    if inside.sites:
        pieces.append(f"what makes {', '.join(map(clean, inside.sites))}, not compared on that row")
    if before.stage == MODULE:
        itself = (
            f"{clean(before.layer)} itself" if not before.part else f"what makes that {_plain(before.part)}"
        )
        pieces.insert(0, f"{itself}; or what is computed between the two in the code that calls them")
    return pieces


def _layers(numbers: list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"layer {first}"
    if numbers == list(range(first, last + 1)):
        return f"layers {first}–{last}"
    return f"{len(numbers)} layers between {first} and {last}"


def _either(pieces: list[str]) -> str:
    return f"{'; '.join(pieces[:-1])}; or {pieces[-1]}" if len(pieces) > 1 else "".join(pieces)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text.startswith("the ") else text


def _verb(where: Place, one: str = "is", many: str = "are") -> str:
    plural = where.stage in (INSIDE, FINAL, LM_HEAD) or where.part.endswith("s")
    return many if plural else one


def elements(finding: Finding, sides: tuple[str, str] = (CANDIDATE, PARENT)) -> str:
    """How the two rows, called `sides`, differ, in one sentence; empty where only digests were kept."""
    one, other = sides
    if finding.class_ in ("dtype", "shape"):
        return f"The two sides have another {finding.class_} there."
    if finding.elements_differ is None or finding.values is None:
        return "Only digests were kept of that row: capture with --payload all to see how much it differs."
    ours, theirs = finding.values.candidate, finding.values.parent
    index = "" if not finding.first_element else f", the first at {finding.first_element}"
    verb = "differs" if finding.elements_differ == 1 else "differ"
    if finding.max_ulp is None and finding.cosine is None and finding.class_ == "value":  # integers
        return f"{_share(finding)} {verb}{index}: {one} {ours.decimal}, {other} {theirs.decimal}."
    sizes = [
        f"max {name} {value:.3g}"
        for name, value in (("abs", finding.max_abs), ("rel", finding.max_rel))
        if value is not None
    ]
    if finding.max_ulp is not None:
        sizes.insert(0, f"max ULP {finding.max_ulp:,}")
    return (
        f"{_share(finding)} {verb} "
        f"(class {finding.class_}{'; ' if sizes else ''}{', '.join(sizes)}){index}: "
        f"{one} {ours.decimal} ({ours.hex}), {other} {theirs.decimal} ({theirs.hex})."
    )


def _share(finding: Finding) -> str:
    return f"{finding.elements_differ:,} of {count(finding.elements or 0, 'element')}"


def logits(found: Logits, sides: tuple[str, str] = (CANDIDATE, PARENT)) -> str:
    """The two highest logits of both rows, called `sides`."""
    flip = "the argmax flips" if found.argmax_flip else "the argmax is the same"
    tie = " A tie explains a flip; it does not excuse the difference." if _tied(found) else ""
    return f"{sides[0]} {top(found.candidate)}; {sides[1]} {top(found.parent)}; {flip}.{tie}"


def _tied(found: Logits) -> bool:
    return found.argmax_flip and (found.candidate.tie or found.parent.tie)


def top(top: TopTwo) -> str:
    """The two highest of a row, with their distance."""
    if top.top2 is None or top.top2_value is None or top.margin is None:
        return f"{top.top1} ({top.top1_value:.6g})"
    how = "tied" if top.tie else f"margin {top.margin:.3g}"
    return f"{top.top1} ({top.top1_value:.6g}) before {top.top2} ({top.top2_value:.6g}), {how}"


def tokens(found: Tokens) -> str:
    """Token parity in one line."""
    if not found.requests:
        return "no request of both captures can be paired"
    unfinished = (
        f"; {count(found.requests_unfinished, 'request')} not finished on both sides, "
        "compared as far as both go"
        if found.requests_unfinished
        else ""
    )
    if not found.requests_differ:
        return (
            f"all {count(found.requests, 'request')} returned the same tokens, "
            f"{count(found.positions, 'position')}{unfinished}"
        )
    verb = "differs" if found.requests == 1 else "differ"
    text = (
        f"{found.requests_differ:,} of {count(found.requests, 'request')} {verb}, "
        f"at {found.positions_differ:,} of {count(found.positions, 'position')}{unfinished}"
    )
    if found.first is not None:
        request, position, output = found.first.request, found.first.position, found.first.output_index
        text += f"; first at request {clean(request)}, position {position} (output {output})"
    return text


def repeats(found: Tokens) -> str:
    """What the passes of each source say about it; empty with one pass."""
    if found.repeats_equal is None:
        return ""
    words = {True: "equal", False: "DIFFERENT", None: "not known"}
    both = found.repeats_equal
    return f"repeats within the candidate: {words[both.candidate]}; within the parent: {words[both.parent]}"


def stored(cover: StoredCoverage) -> str:
    """What was compared byte for byte; when it was not as the digests say, the captures were refused."""
    pairs = count(cover.pairs, "row × site pair")
    return f"{pairs} ({cover.bytes:,} bytes a side), {cover.differ:,} of them different, as the digests say"
