"""What a result establishes and what it does not, computed from its coverage."""

from __future__ import annotations

from localizer.diff.localize import CODE_BETWEEN, DRAFT_ENTRY, IN_ATTENTION
from localizer.diff.places import place
from localizer.diff.result import IDENTICAL, Both, Record, Result
from localizer.report import controls, native, tolerance, within, wording
from localizer.report.counts import count
from localizer.report.safe import clean
from localizer.report.wording import no_site, stored
from localizer.wire.spec import RESIDUAL


class Scope(Record, frozen=True, kw_only=True):
    """Sentences of both kinds."""

    establishes: list[str]
    does_not_establish: list[str]


def scope(result: Result) -> Scope:
    """The scope of a result; it never reaches past what was compared."""
    if within.is_within(result):
        return Scope(
            establishes=within.establishes(result), does_not_establish=within.does_not_establish(result)
        )
    return Scope(
        establishes=[*establishes(result), *controls.establishes(result)],
        does_not_establish=[*controls.open_questions(result), *does_not_establish(result)],
    )


def establishes(result: Result) -> list[str]:
    """What the result shows."""
    cover, pairs, tokens = result.coverage, result.coverage.pairs, result.tokens
    said = []
    if pairs.compared:
        sites = sum(1 for item in result.sites if item.rows_compared)
        said.append(
            f"{count(pairs.compared, 'row × site pair')} ({count(cover.rows.paired, 'paired row')}, "
            f"{count(sites, 'site')}) compared by xxh3-128 digest: {pairs.compared - pairs.differ:,} equal, "
            f"{pairs.differ:,} different."
        )
    if cover.stored is not None and cover.stored.pairs:
        said.append(f"Compared byte for byte too: {stored(cover.stored)}.")
    if result.first is not None:
        first = result.first
        said.append(
            f"Of what was compared, nothing differs before {clean(first.site)} of request "
            f"{clean(first.request)}, position {first.position}, in the candidate's causal order."
        )
        if first.segment.after is not None:
            said.append(
                f"On that row {clean(first.segment.after)} has equal bytes on both sides, "
                f"{clean(first.site)} has not."
            )
    if tokens.requests:
        same = tokens.requests - tokens.requests_differ
        said.append(
            f"{same:,} of {count(tokens.requests, 'paired request')} returned the same tokens"
            f"{' as far as both go' if tokens.requests_unfinished else ''}."
        )
    if cover.model_files_equal:
        said.append("Both sources read model files of equal digests.")
    if cover.draft_files_equal:
        said.append("Both drafts read model files of equal digests.")
    if cover.weights_equal:
        said.append("Both sources loaded weights of equal digests.")
    said += tolerance.establishes(result)
    return said


def does_not_establish(result: Result) -> list[str]:
    """What the result leaves open."""
    cover = result.coverage
    said = _segment(result)
    if cover.layers.candidate != "all" or cover.layers.parent != "all":
        said.append(
            "Anything about attention layers that were not recorded "
            f"(candidate: {clean(cover.layers.candidate)}, parent: {clean(cover.layers.parent)})."
        )
    only = len(cover.sites.candidate_only) + len(cover.sites.parent_only)
    if only:
        said.append(f"Anything about {count(only, 'site')} that only one capture holds.")
    if cover.sites.not_comparable:
        several = count(len(cover.sites.not_comparable), "site")
        said.append(f"Anything about {several} that the captures hold digests of different algorithms of.")
    if cover.sites.split:
        several = count(len(cover.sites.split), "site")
        said.append(f"Anything about {several} {wording.split(cover.sites.split)}.")
    said += _rows(result)
    missing = cover.pairs.missing.candidate + cover.pairs.missing.parent
    if missing:
        said.append(
            f"Anything about {count(missing, 'row × site pair')} that should have been recorded and was not."
        )
    said += _payload(result)
    said += tolerance.does_not_establish(result)
    said += native.does_not_establish(result)
    said.append("KV cache contents and block tables: they were not compared.")
    if cover.weights_equal is None and cover.model_files_equal is None:
        said.append("That both used the same weights: no digests of them are known on both sides.")
    elif cover.weights_equal is None:
        said.append("The weights as loaded: they were not compared.")
    elif not cover.weights_equal:
        said.append("What the code alone does: the weights as loaded differ.")
    if result.verdict == IDENTICAL:
        said.append("That other prompts, batches, schedules, models or machines give equal bytes.")
    else:
        said.append("Other prompts, batches, schedules, models or machines.")
    said.append("Quality of the output or performance.")
    return said


def _segment(result: Result) -> list[str]:
    first = result.first
    if first is None:
        unnamed = f"In which tensor the token difference enters: {no_site(result)}."
        return [unnamed] if result.tokens.first is not None else []
    if first.blame == IN_ATTENTION:
        return ["Which of kernel, metadata and KV contents is at fault."]
    said = []
    if first.segment.after is not None:
        said.append(
            "Which operation inside the segment is at fault: nothing between its two sites was observed."
        )
    if first.blame == CODE_BETWEEN and not _stream_seen(result, first.site):
        anywhere = any(place(item.name).part == RESIDUAL for item in result.sites)
        said.append(
            "That the segment's hidden input is equal: the residual stream "
            f"{'was not compared right before it' if anywhere else 'is not a site'}, and a difference "
            "that rounding hid from the sites upstream would have entered earlier."
        )
    if first.blame == DRAFT_ENTRY and first.fed_by is not None and first.fed_by.draft_step:
        said.append(
            "That the hidden states handed on by the draft step before are equal: only those that feed its "
            "logits are a site."
        )
    return said


def _stream_seen(result: Result, site: str) -> bool:
    """Whether the residual stream was compared upstream of a site, in its own layer or the one before."""
    end = place(site)
    for item in result.sites:
        if item.name == site:
            return False
        where = place(item.name)
        near = end.number is None or where.number is None or end.number - where.number in (0, 1)
        if item.rows_compared and where.part == RESIDUAL and where.draft == end.draft and near:
            return True
    return False


def _rows(result: Result) -> list[str]:
    rows = result.coverage.rows
    past = rows.past_token_difference
    said = []
    if past.candidate or past.parent:
        said.append(
            "Anything past a request's first different token: "
            f"{_sides(past, 'row')} there have other prefixes and were not compared."
        )
    others = Both(
        candidate=sum(rows.without_counterpart.candidate.values()),
        parent=sum(rows.without_counterpart.parent.values()),
    )
    if others.candidate or others.parent:
        said.append(f"Anything about {_sides(others, 'row')} without a counterpart of equal prefix.")
    if result.tokens.requests_unpaired:
        said.append(
            f"Token parity of {count(result.tokens.requests_unpaired, 'request')} without a counterpart."
        )
    return said


def _payload(result: Result) -> list[str]:
    if result.first is None or result.first.class_ is not None:
        return []
    return ["How large the first difference is: only digests of that row were kept on both sides."]


def _sides(both: Both[int], noun: str) -> str:
    return f"{count(both.candidate, noun)} of the candidate and {both.parent:,} of the parent"
