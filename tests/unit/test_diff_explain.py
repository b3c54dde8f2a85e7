"""The plan: why rows have no counterpart, and that nothing is left out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered import edit
from builders import Plan, attention, bump, drafted, pair, write
from cases import CASES, explained

from localizer.diff import diff, diff_within
from localizer.diff.plan import UNPAIRED, AlignPlan, UnpairedRows
from localizer.diff.plan import Plan as Steps
from localizer.report.explain import _REASONS
from localizer.store.reader import Capture

SPECULATING = Plan(speculate=3, max_tokens=8, draft_files={"a": "aa"})
PROMPTS = ((1, 2, 3), (4, 5, 6), (1, 2, 3))


def planned(one: Path, other: Path, change: Callable[[Capture], None] | None = None) -> Steps:
    captures = Capture(one), Capture(other)
    for capture in captures:
        capture.check()
    if change is not None:
        change(captures[1])
    found = diff(*captures, explain=True).plan
    assert found is not None
    return found


def reasons(found: AlignPlan) -> tuple[dict[str, int], dict[str, int]]:
    def counted(items: list[UnpairedRows]) -> dict[str, int]:
        return {item.reason: item.rows for item in items}

    return counted(found.unpaired.candidate), counted(found.unpaired.parent)


def without(position: int, request: int) -> Callable[[Capture], None]:
    """Drop the target's rows of a request before a position, as a prefix cache does."""

    def change(capture: Capture) -> None:
        table, columns = capture.table, capture.table.columns
        keep = (columns["request"] != request) | (columns["position"] >= position)
        capture.table = replace(
            table,
            columns={name: column[keep] for name, column in columns.items()},
            prefix=table.prefix[keep],
            digest=table.digest[keep],
            present=table.present[keep],
        )

    return change


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_paired_or_has_a_reason(tmp_path: Path, name: str) -> None:
    found = explained(name, tmp_path)
    assert found.plan is not None
    align = found.plan.align
    ours, theirs = reasons(align)
    assert align.paired + sum(ours.values()) == align.rows.candidate
    assert align.paired + sum(theirs.values()) == align.rows.parent
    assert sum(item.rows for item in align.kind_pairs) == align.paired
    assert sum(item.rows for item in align.round_pairs) == align.paired
    assert sum(item.differ for item in align.kind_pairs) == found.plan.localize.rows
    deciding = next(rule for rule in found.plan.verdict if rule.holds)
    assert deciding.verdict == found.verdict


@pytest.mark.parametrize(
    "plan", [SPECULATING, Plan(repeats=2), Plan(only_tokens=True), replace(SPECULATING, repeats=2)]
)
def test_every_row_within_is_paired_or_has_a_reason(tmp_path: Path, plan: Plan) -> None:
    found = diff_within(Capture(write(tmp_path, plan)), explain=True)
    assert found.plan is not None
    align = found.plan.align
    ours, _ = reasons(align)
    assert align.paired + sum(ours.values()) == align.rows.candidate
    first = ours.get("first-of-its-prefix", 0)
    assert align.repeated.candidate.rows == align.paired + first
    assert align.repeated.candidate.keys == first
    assert next(rule for rule in found.plan.verdict if rule.holds).verdict == found.verdict


def test_every_reason_has_its_words() -> None:
    assert set(_REASONS) == set(UNPAIRED)


def test_kinds_pair_across_speculation(tmp_path: Path) -> None:
    found = planned(*pair(tmp_path, replace(SPECULATING, speculate=0), speculate=3)).align
    kinds = {(item.candidate, item.parent) for item in found.kind_pairs}
    assert kinds == {("prefill", "prefill"), ("decode", "decode"), ("verify-accepted", "decode")}
    ours, theirs = reasons(found)
    assert set(ours) == {"draft-padding", "no-draft-on-other-side", "draft-not-tried"}
    assert theirs == {}


def test_kinds_pair_across_chunks(tmp_path: Path) -> None:
    found = planned(*pair(tmp_path, chunk=2)).align
    assert {(item.candidate, item.parent) for item in found.kind_pairs} >= {("prefill-chunk", "prefill")}
    assert reasons(found) == ({}, {})


def test_another_proposal(tmp_path: Path) -> None:
    base = 3
    found = planned(*pair(tmp_path, SPECULATING, proposals={("r01.01", base): (0, 0, 0)})).align
    ours, theirs = reasons(found)
    assert ours.keys() >= {"other-proposal", "draft-not-tried"}
    assert theirs.keys() >= {"other-proposal"}


def test_past_a_token_difference(tmp_path: Path) -> None:
    tokens = Plan().tokens("r01.01")
    found = planned(*pair(tmp_path, outputs={"r01.01": [15, *tokens[1:]]})).align
    assert reasons(found) == ({"past-token-difference": 3}, {"past-token-difference": 3})
    assert found.unpaired.candidate[0].example.position == 3


def test_requests_of_one_side_alone(tmp_path: Path) -> None:
    found = planned(
        *pair(tmp_path, Plan(prompts=((1, 2, 3), (4, 5, 6))), prompts=((1, 2, 3), (7, 8, 9)))
    ).align
    assert reasons(found) == ({"request-not-in-other": 6}, {"request-not-in-other": 6})


def test_more_occurrences(tmp_path: Path) -> None:
    found = planned(*pair(tmp_path, Plan(matrix=(1,)), matrix=(1, 1))).align
    assert found.key == "prefix"
    assert reasons(found) == ({"more-occurrences": 6}, {})
    repeated = found.repeated.candidate
    assert (repeated.keys, repeated.rows, repeated.paired) == (6, 12, 6)
    assert repeated.example is not None
    assert repeated.example.request == "r01.00"


def test_what_the_other_side_took_from_its_cache(tmp_path: Path) -> None:
    found = planned(*pair(tmp_path), without(2, 1)).align
    assert reasons(found) == ({"cached-on-other-side": 2}, {})


def test_what_the_other_side_did_not_get_to(tmp_path: Path) -> None:
    found = planned(*pair(tmp_path, Plan(max_tokens=2), max_tokens=4)).align
    assert reasons(found) == ({"ended-earlier": 6}, {})


def test_requests_without_rows(tmp_path: Path) -> None:
    found = planned(*pair(tmp_path), without(99, 1)).align
    assert reasons(found) == ({"request-without-rows": 6}, {})


def test_unknown_prefixes(tmp_path: Path) -> None:
    def change(capture: Capture) -> None:
        prefix = np.array(capture.table.prefix)
        prefix[4] = 0
        capture.table = replace(capture.table, prefix=prefix)

    found = planned(*pair(tmp_path), change).align
    assert reasons(found) == ({"not-recorded": 1}, {"unknown-prefix": 1})


def test_sites_of_one_side_and_of_none(tmp_path: Path) -> None:
    one, other = pair(tmp_path, Plan(layers=(0, 1)), layers=(1, 2))
    why = {attention(5, "key"): "shares the cache of layer 4"}
    edit(other, "manifest.json", lambda it: it.update(not_applicable=why))
    found = planned(one, other).align
    assert found.not_applicable == why
    assert [name.split(".")[2] for name in (found.candidate_only[0], found.parent_only[0])] == ["2", "0"]


def test_other_layouts(tmp_path: Path) -> None:
    site = attention(1, "output")
    found = planned(*pair(tmp_path, layouts={site: ("float32", (8,))}))
    assert found.compare.other_layout == [site]


def test_the_order_is_causal(tmp_path: Path) -> None:
    changes = {
        ("r01.01", 4, drafted(attention(3, "query"), 2)): bump(),
        ("r01.01", 2, attention(1, "query")): bump(),
        ("r00.00", 2, attention(2, "query")): bump(),
    }
    found = planned(*pair(tmp_path, SPECULATING, changes=changes)).localize
    steps = [item.step for item in found.first]
    assert steps == sorted(steps)
    assert found.rows >= 2
    assert found.first[0].request == "r00.00"


def test_a_plan_is_made_only_on_request(tmp_path: Path) -> None:
    one, other = pair(tmp_path)
    assert diff(Capture(one), Capture(other)).plan is None


def test_plans_are_frozen(tmp_path: Path) -> None:
    found: Any = planned(*pair(tmp_path))
    with pytest.raises(AttributeError):
        found.align.paired = 0
    assert "AlignPlan(key='request+prefix'" in repr(found)
