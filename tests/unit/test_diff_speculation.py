"""Speculative decoding on both sides: acceptance, proposals, coverage and settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import Plan, attention, bump, drafted, pair

from localizer.diff import diff
from localizer.diff.result import Acceptance, Both, ProposalFirst, Result
from localizer.store.reader import Capture
from localizer.wire.spec import HIDDEN, LOGITS

PLAN = Plan(matrix=(2,), max_tokens=10, speculate=3)
"""r00.00 verifies at positions 3-6, 6-9 and 9-11, r00.01 at 3-6, 4-7, 8-11 and 9-11."""

REQUEST = "r00.00"
VERIFIED = Acceptance(
    verifications=7,
    proposed=19,
    accepted=11,
    accepted_rows=18,
    rejected_rows=8,
    accepted_paired=18,
    rejected_paired=8,
    accepted_with_decode=0,
)
NONE = Acceptance(
    verifications=0,
    proposed=0,
    accepted=0,
    accepted_rows=0,
    rejected_rows=0,
    accepted_paired=0,
    rejected_paired=0,
    accepted_with_decode=0,
)


def compared(root: Path, plan: Plan = PLAN, **candidate: object) -> Result:
    one, other = pair(root, plan, **candidate)
    return diff(Capture(one), Capture(other))


def test_without_speculation_there_is_none(tmp_path: Path) -> None:
    assert compared(tmp_path, Plan()).speculation is None


@pytest.mark.parametrize(("method", "proposals"), [("eagle3", 27), ("draft_model", 27), ("ngram", 0)])
def test_acceptance_of_both_sides(tmp_path: Path, method: str, proposals: int) -> None:
    found = compared(tmp_path, replace(PLAN, method=method)).speculation
    assert found is not None
    assert (found.candidate, found.parent) == (VERIFIED, VERIFIED)
    assert (found.proposals.compared, found.proposals.differ, found.proposals.first) == (proposals, 0, None)


@pytest.mark.parametrize("speculating", ["candidate", "parent"])
def test_accepted_rows_pair_with_decode_rows(tmp_path: Path, speculating: str) -> None:
    plan = PLAN if speculating == "parent" else replace(PLAN, speculate=0)
    result = compared(tmp_path, plan, speculate=3 - plan.speculate)
    assert (result.verdict, result.reasons) == ("identical", [])
    assert result.speculation is not None
    sides = {"candidate": result.speculation.candidate, "parent": result.speculation.parent}
    assert sides.pop(speculating) == Acceptance(
        verifications=7,
        proposed=19,
        accepted=11,
        accepted_rows=18,
        rejected_rows=8,
        accepted_paired=18,
        rejected_paired=0,
        accepted_with_decode=18,
    )
    assert list(sides.values()) == [NONE]
    rows = result.coverage.rows
    assert rows.paired == 2 * 12
    others = {"candidate": rows.without_counterpart.candidate, "parent": rows.without_counterpart.parent}
    drafts = {"draft-1": 24, "draft-2": 9, "draft-3": 9}
    assert others.pop(speculating) == {"verify-rejected": 8, **drafts}
    assert list(others.values()) == [{}]


def test_padding_is_counted_on_its_own(tmp_path: Path) -> None:
    rows = compared(tmp_path).coverage.rows
    assert rows.draft_padding == rows.unpaired == Both(candidate=8, parent=8)
    assert rows.without_prefix == rows.past_token_difference == Both(candidate=0, parent=0)
    assert rows.without_counterpart == Both(candidate={}, parent={})


# -- proposals -------------------------------------------------------------------------------------------


def other_proposal(plan: Plan) -> dict[tuple[str, int], list[int]]:
    """What r00.00 proposes from base 5, with another last token."""
    right = [9, 11, 12]
    return {(REQUEST, 5): [*right[:2], 13]} if plan.speculate else {}


def test_other_proposals_from_equal_logits_are_a_divergence(tmp_path: Path) -> None:
    level = {(REQUEST, 7, drafted(LOGITS, 3)): lambda row: row * 0}
    result = compared(tmp_path, replace(PLAN, changes=level), changes=level, proposals=other_proposal(PLAN))
    assert (result.verdict, result.first, result.coverage.pairs.differ) == ("diverged", None, 0)
    assert result.speculation is not None
    found = result.speculation.proposals
    assert (found.compared, found.differ) == (27, 1)
    assert found.first == ProposalFirst(request=REQUEST, position=7, step=1, draft_step=3)
    assert result.tokens.requests_differ == 0
    rows = result.coverage.rows.without_counterpart
    assert rows == Both(candidate={"verify-rejected": 1}, parent={"verify-rejected": 1})


def test_other_proposals_are_found_in_the_draft_s_logits(tmp_path: Path) -> None:
    result = compared(tmp_path, proposals=other_proposal(PLAN))
    assert result.first is not None
    assert (result.first.site, result.first.blame) == ("draft:" + LOGITS, "lm-head")
    assert result.first.logits is not None
    assert result.first.logits.argmax_flip
    assert (result.first.logits.candidate.top1, result.first.logits.parent.top1) == (13, 12)
    assert result.rows.amplifier is None  # that is of the target


# -- only the draft differs ------------------------------------------------------------------------------


def test_the_target_s_and_the_draft_s_pairs_are_told_apart(tmp_path: Path) -> None:
    pairs = compared(tmp_path, changes={(REQUEST, 5, drafted(HIDDEN, 1)): bump()}).coverage.pairs
    assert (pairs.differ, pairs.draft_differ) == (1, 1)
    assert pairs.draft_compared == (24 + 9 + 9) * 6 + 27 * 2
    target = compared(tmp_path / "target", changes={(REQUEST, 5, HIDDEN): bump()}).coverage.pairs
    assert (target.differ, target.draft_differ) == (1, 0)
    assert target.compared - target.draft_compared == 32 * (14 + 3) + 28 * 2 + 20


def test_sites_are_the_target_s_and_then_the_draft_s(tmp_path: Path) -> None:
    names = [item.name for item in compared(tmp_path).sites]
    drafts = [name.startswith("draft:") for name in names]
    assert drafts == sorted(drafts)
    assert names[drafts.index(True) - 1] == "sampler/token"


# -- past a token difference -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_draft_rows_past_a_different_token(tmp_path: Path, method: str) -> None:
    """All that follow from it are told as such: draft rows, proposals and verifications."""
    plan = replace(PLAN, method=method)
    tokens = [*plan.tokens(REQUEST)[:5], *((token + 1) % 16 for token in plan.tokens(REQUEST)[5:])]
    result = compared(tmp_path, plan, outputs={REQUEST: tokens})
    rows = result.coverage.rows
    assert result.verdict == "diverged"
    assert rows.past_token_difference.candidate > 0
    assert {"draft-1", "draft-2", "draft-3"}.isdisjoint(rows.without_counterpart.candidate)
    assert {"draft-1", "draft-2", "draft-3"}.isdisjoint(rows.without_counterpart.parent)
    unpaired = rows.unpaired.candidate - rows.draft_padding.candidate - rows.past_token_difference.candidate
    assert unpaired == sum(rows.without_counterpart.candidate.values())


# -- another draft model ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "known"), [({"model": "bb"}, False), ({"model": "aa"}, True), ({}, None)])
def test_another_draft_model_is_a_setting(tmp_path: Path, files: dict[str, str], known: bool | None) -> None:
    plan = replace(PLAN, draft_files={"model": "aa"}, model_files={"model": "cc"})
    changes = {(REQUEST, 5, drafted(attention(3, "query"), 1)): bump()}
    result = compared(tmp_path, plan, draft_files=files, changes=changes)
    assert (result.verdict, result.reasons) == ("diverged", [])
    assert (result.coverage.model_files_equal, result.coverage.draft_files_equal) == (True, known)
    settings = {item.setting: (item.candidate, item.parent) for item in result.differences}
    assert settings == ({} if known else {"draft.files.model": (files.get("model"), "aa")})


def test_no_draft_model_on_one_side(tmp_path: Path) -> None:
    result = compared(tmp_path, replace(PLAN, draft_files={"model": "aa"}), method="ngram")
    assert result.coverage.draft_files_equal is None
    assert {item.setting for item in result.differences} == {"draft.name", "draft.files.model"}
