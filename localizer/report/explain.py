"""The plan of a diff in words: align, compare, localize, verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localizer.diff import plan
from localizer.diff.align import BY_PREFIX, BY_REQUEST, WITHIN
from localizer.diff.result import CANDIDATE, PARENT, Result
from localizer.report.blocks import Block, Bullets, Line, Table
from localizer.report.counts import count
from localizer.report.safe import clean

SHOWN = 12
"""Lines of a table, or names of a list; the JSON result has all."""

_KEYS = {
    BY_REQUEST: "rows pair by request and prefix, since the workloads are equal",
    BY_PREFIX: "rows pair by prefix alone, since the workloads are not equal",
    WITHIN: "each row pairs with the first earlier one of equal prefix in the same capture",
}

_REASONS = {
    plan.PADDING: "padding of a draft: rows of rejected tokens are never compared",
    plan.UNKNOWN_PREFIX: "unknown prefix: the tokens before it are not known",
    plan.NOT_ASKED: "the other side was not asked that prompt",
    plan.PAST_DIFFERENCE: "past the first different token of its request",
    plan.NO_DRAFT: "the other side has no draft",
    plan.MORE_OCCURRENCES: "computed more often than on the other side",
    plan.NO_ROWS_OF_REQUEST: "the other side has no rows of that request",
    plan.CACHED: "cached on the other side: before the first position that the request computed there",
    plan.ENDED: "the other side's rows of that request end before it",
    plan.OTHER_PROPOSAL: "the other side's draft had other inputs there, or proposed from another position",
    plan.NOT_TRIED: "a rejected draft token that the other side did not try",
    plan.NO_ROW: "the other side has no row of equal prefix",
    plan.FIRST_OF_PREFIX: "the first of its prefix: later ones pair with it",
    plan.ONLY_ONE: "the only one of its prefix",
}

_RULES = {
    "not-comparable": "the two were not asked to compute the same",
    "difference": "a row, a token or a proposed token differs",
    "incomplete": "something is incomplete, or nothing was compared",
    "otherwise": "otherwise",
}


def blocks(result: Result) -> Iterator[Block]:
    """The plan, before the report; nothing where it was not asked for."""
    found = result.plan
    if found is None:
        return
    within = found.align.key == WITHIN
    names = ("later", "earlier") if within else (CANDIDATE, PARENT)
    yield Line("Plan: align")
    yield from _align(found.align, names, within)
    yield Line("Plan: compare", "heading")
    yield Bullets(list(_compare(found.compare, names)))
    yield Line("Plan: localize", "heading")
    yield Bullets(list(_localize(found.localize)))
    rules = _RULES | ({"not-comparable": "nothing was asked twice"} if within else {})
    yield Line("Plan: verdict, by the first rule that holds", "heading")
    yield Bullets(
        [f"{rules[it.rule]} ({it.verdict}): {'yes' if it.holds else 'no'}" for it in _tried(found.verdict)]
    )
    yield Line("Report", "heading")


def _align(found: plan.AlignPlan, names: tuple[str, str], within: bool) -> Iterator[Block]:
    ours, theirs = found.rounds.candidate, found.rounds.parent
    rounds = count(ours, "round") if within else f"{count(ours, 'round')} and {count(theirs, 'round')}"
    rows = (
        f"{count(found.rows.candidate, 'row')}"
        if within
        else f"{count(found.rows.candidate, 'row')} and {count(found.rows.parent, 'row')}"
    )
    yield Bullets([_KEYS[found.key], f"{rounds}, {rows}: {count(found.paired, 'pair')}", *_repeated(found)])
    one, other = names
    yield from _table(
        [f"{one} round", "batch", f"{other} round", "batch", "row pairs", "differ"],
        [
            [
                *map(str, (it.candidate, it.sizes.candidate, it.parent, it.sizes.parent)),
                *(f"{it.rows:,}", f"{it.differ:,}"),
            ]
            for it in found.round_pairs
        ],
        frozenset(range(6)),
    )
    kinds = [[it.candidate, it.parent, f"{it.rows:,}", f"{it.differ:,}"] for it in found.kind_pairs]
    yield from _table([f"{one} kind", f"{other} kind", "row pairs", "differ"], kinds, frozenset({2, 3}))
    sides = (("the capture", found.unpaired.candidate),) if within else (
        ("the candidate", found.unpaired.candidate),
        ("the parent", found.unpaired.parent),
    )  # fmt: skip
    for side, unpaired in sides:
        if unpaired:
            yield Line(f"  Rows of {side} without a counterpart")
            yield Bullets([f"{it.rows:,}: {_REASONS[it.reason]} (as {_row(it.example)})" for it in unpaired])
    yield Bullets(list(_sites(found, within)))


def _repeated(found: plan.AlignPlan) -> Iterator[str]:
    within = found.key == WITHIN
    how = "each with the first" if within else "the k-th with the k-th"
    sides = (("capture", found.repeated.candidate),) if within else (
        ("candidate", found.repeated.candidate),
        ("parent", found.repeated.parent),
    )  # fmt: skip
    for side, it in sides:
        if it.example is None:
            if found.paired:
                yield f"every key has one row in the {side}"
            continue
        paired = f"{it.paired:,} of their {count(it.rows, 'row')} paired, {how}"
        verb = "has" if it.keys == 1 else "have"
        yield f"{count(it.keys, 'key')} {verb} several rows in the {side} (as {_row(it.example)}): {paired}"


def _sites(found: plan.AlignPlan, within: bool) -> Iterator[str]:
    yield f"{count(found.shared, 'site')}" if within else f"{count(found.shared, 'shared site')}"
    for side, names in ((CANDIDATE, found.candidate_only), (PARENT, found.parent_only)):
        if names:
            yield f"only in the {side}: {_names(names)}"
    for number, (name, why) in enumerate(found.not_applicable.items()):
        if number == SHOWN:
            yield f"… and {len(found.not_applicable) - SHOWN} more that are not applicable"
            return
        yield f"not applicable: {clean(name)} ({clean(why)})"


def _compare(found: plan.ComparePlan, names: tuple[str, str]) -> Iterator[str]:
    yield f"{count(found.compared, 'row × site pair')} by {found.digest}: {found.differ:,} differ"
    for side, missing in zip(names, (found.missing.candidate, found.missing.parent), strict=True):
        if missing:
            yield f"{count(missing, 'pair')} not compared: the {side} row was to be recorded and was not"
    if found.other_layout:
        yield f"of another dtype or shape: {_names(found.other_layout)}"


def _localize(found: plan.LocalizePlan) -> Iterator[str]:
    order = "by step, draft step, request, position and execution order"
    yield f"{count(found.rows, 'row')} with a difference, {order}"
    for it in found.first:
        where = f"request {clean(it.request)}, position {it.position}, {clean(it.kind)} (step {it.step})"
        yield f"{where}: first at {clean(it.site)}"
    if found.rows > len(found.first):
        yield f"… and {found.rows - len(found.first):,} more"


def _tried(rules: Sequence[plan.Rule]) -> Iterator[plan.Rule]:
    """The rules up to the one that decides."""
    for rule in rules:
        yield rule
        if rule.holds:
            return


def _table(header: Sequence[str], rows: list[list[str]], right: frozenset[int]) -> Iterator[Block]:
    if rows:
        yield Table(header, rows[:SHOWN], right)
    if len(rows) > SHOWN:
        yield Line(f"  … and {len(rows) - SHOWN} more; --format json lists all")


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(clean(name) for name in names[:SHOWN]) + more


def _row(row: plan.ExampleRow) -> str:
    again = f", occurrence {row.occurrence + 1}" if row.occurrence else ""
    return f"request {clean(row.request)}, position {row.position}, {row.kind}, step {row.step}{again}"
