"""The sentences about speculative decoding."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from builders import Plan, attention, bump, drafted, pair, put
from findings import finding

from localizer.diff import diff
from localizer.diff.result import FedBy, Result
from localizer.report import speculation, wording
from localizer.report.formats import render
from localizer.report.scope import scope
from localizer.store.reader import Capture
from localizer.wire.spec import AUXILIARY, DRAFT, HIDDEN, INPUT_IDS, LOGITS, POSITIONS, TOKEN

PLAN = Plan(matrix=(2,), max_tokens=10, speculate=3)
REQUEST = "r00.00"
AUX = [f"{AUXILIARY}/{index}" for index in range(3)]
QUERY = DRAFT + attention(3, "query")


def compared(root: Path, plan: Plan = PLAN, **candidate: object) -> Result:
    one, other = pair(root, plan, **candidate)
    return diff(Capture(one), Capture(other))


def text(result: Result) -> str:
    stream = io.StringIO()
    render("text", result, stream)
    return stream.getvalue()


def fed(draft_step: int, equal: int, differ: int, not_compared: int, sites: list[str] | None = None) -> FedBy:
    names = AUX if sites is None else sites
    return FedBy(
        draft_step=draft_step, position=5, sites=names, equal=equal, differ=differ, not_compared=not_compared
    )


# -- the blame -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            fed(0, 3, 0, 0),
            "It was fed the target's auxiliary hidden states of position 5, equal at all 3 sites: the "
            "difference enters on the way into the draft or in it, not in the target.",
        ),
        (fed(0, 2, 1, 0), "which differ at 1 of 3 sites: the difference comes from the target."),
        (fed(0, 2, 0, 1), "only 2 of 3 sites compared (equal): a fault of the target is not ruled out."),
        (fed(0, 0, 0, 3), "position 5, not compared: a fault of the target is not ruled out."),
        (fed(0, 0, 0, 0, []), "position 5, not compared: a fault of the target is not ruled out."),
        (fed(0, 1, 0, 0, [HIDDEN]), "the target's final hidden states of position 5, equal at 1 site:"),
        (
            fed(2, 3, 0, 0),
            "It goes on from draft step 2, position 5, equal at all 3 sites: the difference enters between "
            "the two, or in this one.",
        ),
        (fed(2, 2, 0, 1), "a fault of that draft step is not ruled out."),
        (fed(2, 2, 1, 0), "the difference comes from that draft step."),
        (None, ""),
    ],
)
def test_what_is_said_of_the_row_that_fed_a_draft(row: FedBy | None, words: str) -> None:
    said = wording.blame(finding(DRAFT + INPUT_IDS, QUERY, kind="draft-1", fed_by=row))
    assert said.startswith("The query of the draft's layer 3 differs, the draft's input ids are equal: ")
    assert "the draft's embedding; " in said
    assert (
        "or the first norm, the qkv projection, q/k norm and rotary embedding of the draft's layer 3." in said
    )
    assert words in said
    assert ("hidden states fed to it" in said) == (row is not None)
    assert ("; the hidden states fed to it" in said) == (
        row not in (None, fed(0, 3, 0, 0), fed(0, 1, 0, 0, [HIDDEN]))
    )


def test_a_draft_of_which_nothing_upstream_was_compared() -> None:
    said = wording.blame(finding(None, QUERY, kind="draft-1", fed_by=fed(0, 3, 0, 0)))
    assert "nothing upstream of it was compared on that row" in said
    assert said.endswith("not in the target.")


@pytest.mark.parametrize(
    ("after", "before", "words"),
    [
        (None, INPUT_IDS, ["The inputs of the draft step differ already: the draft's input ids"]),
        (None, POSITIONS, ["the draft's positions"]),
        (attention(3, "value"), attention(3, "output"), ["attention output of the draft's layer 3 differs"]),
        (
            attention(3, "output"),
            attention(4, "key"),
            ["o_proj, the norms and the MLP of the draft's layer 3"],
        ),
        (attention(3, "output"), HIDDEN, ["The draft's final hidden states differ", "the final norm"]),
        (HIDDEN, LOGITS, ["The draft's logits differ, the draft's final hidden states are equal", "lm_head"]),
    ],
)
def test_the_other_segments_of_a_draft(after: str | None, before: str, words: list[str]) -> None:
    said = wording.blame(finding(after and DRAFT + after, DRAFT + before, kind="draft-2"))
    assert [word for word in words if word not in said] == [], said


def test_auxiliary_hidden_states_are_seen_late() -> None:
    said = wording.blame(finding(INPUT_IDS, AUX[1]))
    assert said.startswith("The auxiliary hidden states 1 differ, the input ids are equal: anything from the")
    assert "only when the forward pass returns" in said
    assert "no attention site is known to lie right before them" in said


def test_the_sampler_of_a_verification() -> None:
    assert "and the rejection sampler." in wording.blame(finding(LOGITS, TOKEN, kind="verify-accepted"))
    assert "and the sampler." in wording.blame(finding(LOGITS, TOKEN))


# -- the first line --------------------------------------------------------------------------------------


def test_only_draft_rows_differ(tmp_path: Path) -> None:
    result = compared(tmp_path, changes={(REQUEST, 6, drafted(attention(3, "key"), 2)): bump()})
    target = result.coverage.pairs.compared - result.coverage.pairs.draft_compared
    assert text(result).splitlines()[0] == (
        f"diverged: only draft rows differ, all {target} compared row × site pairs of the target are equal; "
        "first at draft:model.layers.3.self_attn.attn/key, request r00.00, position 6 (step 1, draft step 2)"
    )


def test_a_draft_s_row_first_and_the_target_s_after_it(tmp_path: Path) -> None:
    changes = {
        (REQUEST, 6, drafted(attention(3, "key"), 2)): bump(),
        (REQUEST, 7, attention(1, "key")): bump(),
    }
    lines = text(compared(tmp_path, changes=changes)).splitlines()
    assert lines[0].startswith("diverged: first at draft:model.layers.3.self_attn.attn/key, ")
    assert (
        "first in a row of the target: " + attention(1, "key") + ", request r00.00, position 7 (step 2)"
        in lines
    )


def test_the_target_s_row_first_says_nothing_of_drafts(tmp_path: Path) -> None:
    changes = {
        (REQUEST, 5, attention(1, "key")): bump(),
        (REQUEST, 6, drafted(attention(3, "key"), 2)): bump(),
    }
    shown = text(compared(tmp_path, changes=changes))
    assert shown.startswith(
        f"diverged: first at {attention(1, 'key')}, request r00.00, position 5 (step 1)\n"
    )
    assert "first in a row of the target" not in shown


def test_only_proposals_differ(tmp_path: Path) -> None:
    level = {(REQUEST, 7, drafted(LOGITS, 3)): put(0.0, (slice(None),))}  # type: ignore[dict-item]
    plan = replace(PLAN, changes=level)
    lines = text(compared(tmp_path, plan, proposals={(REQUEST, 5): [9, 11, 13]})).splitlines()
    where = "request r00.00, position 7 (step 1, draft step 3)"
    assert lines[0] == (
        f"diverged: only proposed draft tokens differ, first at {where}; no compared site differs"
    )
    line = next(line for line in lines if line.startswith("speculation: "))
    assert line.endswith(f"the tokens proposed from 1 of 27 paired draft rows differ, first at {where}")


def test_other_draft_models_are_named(tmp_path: Path) -> None:
    plan = replace(PLAN, draft_files={"model": "aa"})
    changes = {(REQUEST, 6, drafted(attention(3, "key"), 2)): bump()}
    lines = text(compared(tmp_path, plan, changes=changes, draft_files={"model": "bb"})).splitlines()
    assert "The two ran different draft models (their files differ)." in lines
    same = compared(tmp_path / "same", plan, changes=changes)
    assert not any("different draft models" in line for line in text(same).splitlines())
    assert "Both drafts read model files of equal digests." in scope(same).establishes


# -- acceptance and coverage -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parent", "candidate", "words"),
    [
        (
            {},
            {},
            "both accepted 11 of 19 draft tokens in 7 verifications; 18 of 18 accepted and 8 of 8 rejected "
            "rows of either side are compared; the tokens proposed from 27 paired draft rows are equal\n",
        ),
        (
            {"speculate": 0},
            {"speculate": 3},
            "the candidate accepted 11 of 19 draft tokens in 7 verifications, the parent verified none; "
            "all 18 accepted rows of the candidate pair with decode rows of the parent, "
            "no rejected rows with any\n",
        ),
        (
            {"method": "ngram"},
            {"speculate": 0},
            "the candidate verified none, the parent accepted 11 of 19 draft tokens in 7 verifications; "
            "all 18 accepted rows of the parent pair with decode rows of the candidate, "
            "no rejected rows with any\n",
        ),
    ],
)
def test_acceptance_in_one_line(
    tmp_path: Path, parent: dict[str, object], candidate: dict[str, object], words: str
) -> None:
    result = compared(tmp_path, replace(PLAN, **parent), **candidate)
    assert f"speculation: {words}" in text(result)


def test_another_number_of_draft_tokens(tmp_path: Path) -> None:
    said = speculation.summary(compared(tmp_path, speculate=1))
    assert said.startswith("the candidate accepted ")
    assert ", the parent accepted 11 of 19 draft tokens in 7 verifications; " in said
    assert "accepted ones with decode rows" in said


def test_what_was_not_comparable_is_not_called_compared(tmp_path: Path) -> None:
    plan = replace(PLAN, model_files={"model": "aa"})
    result = compared(tmp_path, plan, model_files={"model": "bb"})
    assert speculation.summary(result) == "both accepted 11 of 19 draft tokens in 7 verifications"


def test_unpaired_rows_are_told_by_kind(tmp_path: Path) -> None:
    lines = text(compared(tmp_path, replace(PLAN, speculate=0), speculate=3)).splitlines()
    assert "  - unpaired otherwise: 50 candidate (42 draft, 8 verify-rejected) and 0 parent rows" in lines
    assert "  - padding of drafts: 8 candidate and 0 parent rows" in lines
    assert not any("unknown prefix" in line for line in lines)


def test_kinds() -> None:
    assert speculation.kinds({"decode": 3, "prefill": 2}) == ""
    assert speculation.kinds({}) == ""
    assert speculation.kinds({"draft-1": 2, "draft-2": 2, "verify-rejected": 3, "decode": 1}) == (
        " (4 draft, 3 verify-rejected, 1 decode)"
    )


def test_the_scope_of_a_later_draft_step(tmp_path: Path) -> None:
    changes = {(REQUEST, 6, drafted(attention(3, "query"), 2)): bump()}
    said = scope(compared(tmp_path, changes=changes)).does_not_establish
    assert any("handed on by the draft step before" in line for line in said)
    changes = {(REQUEST, 5, drafted(attention(3, "query"), 1)): bump()}
    said = scope(compared(tmp_path / "first", changes=changes)).does_not_establish
    assert not any("handed on by the draft step before" in line for line in said)


def test_a_hostile_name_of_a_draft_site_is_escaped() -> None:
    found = msgspec.structs.replace(finding(None, f"{DRAFT}\x1b[2J/query"), kind="draft-\x1b1")
    assert wording.blame(found).isprintable()
    assert wording.row(found).isprintable()
