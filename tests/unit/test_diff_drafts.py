"""Where the first difference enters when a draft proposes tokens."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import Change, Plan, Where, attention, bump, drafted, pair, put, write
from hypothesis import given, settings
from hypothesis import strategies as st

from localizer.diff import diff
from localizer.diff.drafts import draft_steps, takes_hidden_states
from localizer.diff.places import INSIDE, OUTPUT, place, upstream
from localizer.diff.result import FedBy, Finding, Result
from localizer.store import schema
from localizer.store.reader import Capture
from localizer.wire.spec import AUXILIARY, DRAFT, HIDDEN, INPUT_IDS, LOGITS, POSITIONS, TOKEN

PLAN = Plan(matrix=(2,), max_tokens=10, speculate=3)
"""Request r00.00 verifies at positions 3-6 (6 is rejected) and drafts from base 5; its draft layer is 3."""

MODEL = Plan(matrix=(2,), max_tokens=10, speculate=3, method="draft_model")
"""The same with a draft model of two layers, which takes no hidden states."""

REQUEST = "r00.00"
AUX = [f"{AUXILIARY}/{index}" for index in range(3)]


def compared(root: Path, plan: Plan = PLAN, **candidate: object) -> Result:
    one, other = pair(root, plan, **candidate)
    return diff(Capture(one), Capture(other))


def first(root: Path, changes: dict[Where, Change], plan: Plan = PLAN, **candidate: object) -> Finding:
    found = compared(root, plan, changes=changes, **candidate).first
    assert found is not None
    return found


@pytest.mark.parametrize("method", ["eagle3", "eagle", "draft_model", "ngram"])
def test_equal_speculation_is_identical(tmp_path: Path, method: str) -> None:
    result = compared(tmp_path, Plan(matrix=(2, 1), max_tokens=10, speculate=3, method=method, chunk=2))
    assert (result.verdict, result.reasons) == ("identical", [])
    padding = result.coverage.rows.draft_padding
    assert result.coverage.rows.unpaired == padding
    assert (padding.candidate > 0) == (method != "ngram")


# -- segments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "after", "blame"),
    [
        (INPUT_IDS, None, "inputs"),
        (POSITIONS, None, "inputs"),
        (attention(3, "query"), INPUT_IDS, "draft-entry"),
        (attention(3, "key"), INPUT_IDS, "draft-entry"),
        (attention(3, "output"), attention(3, "value"), "attention"),
        (HIDDEN, attention(3, "output"), "final"),
        (LOGITS, HIDDEN, "lm-head"),
    ],
)
def test_the_segment_of_every_draft_site(tmp_path: Path, site: str, after: str | None, blame: str) -> None:
    change = put(15, ()) if site in (INPUT_IDS, POSITIONS) else bump((0,))
    found = first(tmp_path, {(REQUEST, 5, drafted(site, 1)): change})
    assert (found.site, found.segment.before) == (DRAFT + site, DRAFT + site)
    assert (found.segment.after, found.blame) == (after and DRAFT + after, blame)
    assert (found.request, found.position, found.kind, found.step) == (REQUEST, 5, "draft-1", 1)
    assert (found.unobserved.layers, found.unobserved.sites) == ([], [])
    assert not found.unobserved.later_layers


def test_the_second_layer_of_a_draft_model(tmp_path: Path) -> None:
    found = first(tmp_path, {(REQUEST, 7, drafted(attention(1, "value"), 2)): bump()}, MODEL)
    assert (found.segment.after, found.blame) == (DRAFT + attention(0, "output"), "code-between")
    assert found.fed_by is None


def test_a_target_site_is_never_upstream_of_a_draft_site() -> None:
    names = [INPUT_IDS, attention(0, "query"), LOGITS, DRAFT + attention(1, "query"), TOKEN]
    places = [place(name) for name in names]
    everywhere = [True] * len(names)
    assert upstream(places, 3, everywhere) is None
    assert upstream(places, 4, everywhere) == 2


def test_draft_sites_are_not_inside_a_segment_of_the_target(tmp_path: Path) -> None:
    """The token's site comes after the draft's in the capture, but not in the row."""
    found = first(tmp_path, {(REQUEST, 4, LOGITS): put(9.0, (1,))}, outputs={})
    assert (found.blame, found.unobserved.sites) == ("lm-head", [])
    tokens = PLAN.tokens(REQUEST)
    result = compared(tmp_path / "token", outputs={REQUEST: [*tokens[:9], (tokens[9] + 1) % 16]})
    assert result.first is not None
    assert (result.first.site, result.first.segment.after) == (TOKEN, LOGITS)
    assert result.first.unobserved.sites == []


def test_the_target_s_layer_selection_is_not_the_draft_s(tmp_path: Path) -> None:
    plan = Plan(layers=(1,), observed="1", matrix=(2,), max_tokens=10, speculate=3)
    found = first(tmp_path, {(REQUEST, 5, drafted(HIDDEN, 1)): bump()}, plan)
    assert not found.unobserved.later_layers
    found = first(tmp_path / "target", {(REQUEST, 5, HIDDEN): bump()}, plan)
    assert found.unobserved.later_layers


def test_a_missing_draft_site(tmp_path: Path) -> None:
    absent = frozenset((REQUEST, 5, drafted(attention(3, kind), 1)) for kind in ("query", "key", "value"))
    found = first(tmp_path, {(REQUEST, 5, drafted(attention(3, "output"), 1)): bump()}, absent=absent)
    assert (found.segment.after, found.blame) == (DRAFT + INPUT_IDS, "draft-entry")
    assert found.unobserved.sites == [DRAFT + attention(3, kind) for kind in ("query", "key", "value")]
    assert found.fed_by is not None


# -- causal order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("r00.01", 3, LOGITS), ("r00.00", 3, drafted(INPUT_IDS, 1))),  # the target first
        (("r00.01", 3, drafted(LOGITS, 1)), ("r00.00", 6, drafted(INPUT_IDS, 2))),  # draft step
        (("r00.00", 7, drafted(HIDDEN, 3)), ("r00.01", 8, INPUT_IDS)),  # before the next step
        (("r00.00", 5, drafted(HIDDEN, 1)), ("r00.01", 3, drafted(INPUT_IDS, 1))),  # request
        (("r00.00", 3, drafted(attention(3, "output"), 1)), ("r00.00", 4, drafted(INPUT_IDS, 1))),  # position
        (("r00.00", 6, drafted(attention(3, "output"), 2)), ("r00.00", 6, drafted(HIDDEN, 2))),  # execution
    ],
)
def test_causal_order(tmp_path: Path, one: Where, other: Where) -> None:
    changes = {
        where: put(15, ()) if INPUT_IDS in where[2] else put(3.0) if LOGITS in where[2] else bump()
        for where in (other, one)
    }
    found = first(tmp_path, changes)
    assert (found.request, found.position) == one[:2]
    assert found.site == one[2].partition("@")[0]


def test_the_target_s_own_first_is_told_beside_a_draft_s(tmp_path: Path) -> None:
    changes = {
        (REQUEST, 5, drafted(HIDDEN, 1)): bump(),
        (REQUEST, 7, attention(1, "query")): bump(),
        (REQUEST, 8, attention(0, "query")): bump(),
    }
    rows = compared(tmp_path, changes=changes).rows
    assert rows.cause is not None
    assert (rows.cause.site, rows.cause.position) == (DRAFT + HIDDEN, 5)
    assert rows.target is not None
    assert (rows.target.site, rows.target.position) == (attention(1, "query"), 7)
    alone = compared(tmp_path / "alone", changes={(REQUEST, 5, drafted(HIDDEN, 1)): bump()})
    assert alone.rows.target is None
    assert compared(tmp_path / "target", changes={(REQUEST, 5, HIDDEN): bump()}).rows.target is None


def test_padding_is_never_compared(tmp_path: Path) -> None:
    result = compared(tmp_path, changes={(REQUEST, 6, drafted(attention(3, "key"), 0)): bump()})
    assert result.verdict == "identical"


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["eagle3", "eagle", "draft_model"]),
    st.integers(1, 4),
    st.sampled_from([None, 1, 2]),
    st.data(),
)
def test_a_change_of_any_row_is_found_exactly_there(
    method: str, speculate: int, chunk: int | None, data: st.DataObject
) -> None:
    plan = Plan(matrix=(2,), max_tokens=7, layers=1, speculate=speculate, method=method, chunk=chunk)
    with tempfile.TemporaryDirectory() as folder:
        parent = Capture(write(Path(folder), replace(plan, name="parent")))
        table, sites = parent.table, parent.sites
        comparable = table.prefix.any(axis=1)
        row = data.draw(st.sampled_from(np.flatnonzero(comparable).tolist()), label="row")
        shaped = [index for index in np.flatnonzero(table.present[row]) if sites[index].shape]
        site = sites[data.draw(st.sampled_from(shaped), label="site")].name
        step = int(draft_steps(table.columns["kind"][row : row + 1])[0])
        request = parent.requests[table.columns["request"][row]]
        position = int(table.columns["position"][row])
        where = request, position, f"{site}@{step}" if step else site
        found = diff(Capture(write(Path(folder), replace(plan, changes={where: bump()}))), parent)
    assert found.first is not None
    assert (found.first.request, found.first.position, found.first.site) == (request, position, site)
    assert {item.name for item in found.sites if item.rows_differ} == {site}
    assert found.speculation is not None
    assert found.speculation.proposals.differ == 0
    assert (found.coverage.pairs.draft_differ > 0) == (step > 0)
    if step and found.first.blame == "draft-entry" and method != "draft_model":
        assert found.first.fed_by is not None
        assert (found.first.fed_by.draft_step, found.first.fed_by.differ) == (step - 1, 0)


# -- what fed a draft's row ------------------------------------------------------------------------------


def fed(root: Path, where: Where, plan: Plan = PLAN, **candidate: object) -> FedBy | None:
    return first(root, {where: bump()}, plan, **candidate).fed_by


def test_draft_step_1_is_fed_by_the_target_s_row(tmp_path: Path) -> None:
    found = fed(tmp_path, (REQUEST, 4, drafted(attention(3, "query"), 1)))
    assert found == FedBy(draft_step=0, position=4, sites=AUX, equal=3, differ=0, not_compared=0)


def test_what_was_fed_and_not_compared(tmp_path: Path) -> None:
    absent = frozenset({(REQUEST, 4, AUX[1])})
    found = fed(tmp_path, (REQUEST, 4, drafted(attention(3, "query"), 1)), absent=absent)
    assert found == FedBy(draft_step=0, position=4, sites=AUX, equal=2, differ=0, not_compared=1)


def test_eagle_is_fed_the_final_hidden_states(tmp_path: Path) -> None:
    plan = Plan(matrix=(2,), max_tokens=10, speculate=3, method="eagle")
    found = fed(tmp_path, (REQUEST, 4, drafted(attention(3, "query"), 1)), plan)
    assert found == FedBy(draft_step=0, position=4, sites=[HIDDEN], equal=1, differ=0, not_compared=0)
    prompt = fed(tmp_path / "prompt", (REQUEST, 1, drafted(attention(3, "query"), 1)), plan)
    assert prompt is not None
    assert (prompt.equal, prompt.not_compared) == (0, 1)  # recorded only where they feed logits


def test_eagle_against_eagle3_shares_nothing_that_was_fed(tmp_path: Path) -> None:
    changes = {(REQUEST, 4, drafted(attention(3, "query"), 1)): bump()}
    found = first(tmp_path, changes, method="eagle").fed_by
    assert found == FedBy(draft_step=0, position=4, sites=[], equal=0, differ=0, not_compared=0)


def test_a_later_draft_step_is_fed_by_the_one_before(tmp_path: Path) -> None:
    found = fed(tmp_path, (REQUEST, 7, drafted(attention(3, "value"), 3)))
    assert found is not None
    assert (found.draft_step, found.position) == (2, 6)
    assert (found.equal, found.differ, found.not_compared) == (6, 0, 0)
    assert found.sites[0] == DRAFT + attention(3, "query")
    assert found.sites[-1] == DRAFT + LOGITS


def test_a_later_step_s_row_that_was_fed_and_not_compared(tmp_path: Path) -> None:
    absent = frozenset({(REQUEST, 5, drafted(HIDDEN, 1))})
    found = fed(tmp_path, (REQUEST, 6, drafted(attention(3, "key"), 2)), absent=absent)
    assert found is not None
    assert (found.draft_step, found.position, found.equal, found.not_compared) == (1, 5, 5, 1)


def test_nothing_is_fed_inside_the_draft_or_to_a_draft_model(tmp_path: Path) -> None:
    assert fed(tmp_path, (REQUEST, 5, drafted(attention(3, "output"), 1))) is None
    for step in (1, 2):
        where = REQUEST, 5 + step, drafted(attention(0, "query"), step)
        found = first(tmp_path / str(step), {where: bump()}, MODEL)
        assert (found.blame, found.fed_by) == ("draft-entry", None)


@pytest.mark.parametrize(
    ("method", "takes"), [("eagle3", True), ("eagle", True), ("draft_model", False), ("ngram", False)]
)
def test_which_drafts_take_hidden_states(tmp_path: Path, method: str, takes: bool) -> None:
    one, _ = pair(tmp_path, Plan(matrix=(2,), max_tokens=10, speculate=3, method=method, chunk=2))
    assert takes_hidden_states(Capture(one).table.columns) is takes


def test_draft_steps() -> None:
    kinds = np.arange(len(schema.KINDS), dtype=np.uint8)
    steps = draft_steps(kinds).tolist()
    assert steps[: schema.DRAFT_PADDING + 1] == [0] * (schema.DRAFT_PADDING + 1)
    assert [f"draft-{step}" for step in steps if step] == list(schema.KINDS[schema.DRAFT_PADDING + 1 :])


# -- keys and values -------------------------------------------------------------------------------------


def test_what_a_draft_s_attention_read(tmp_path: Path) -> None:
    """Positions 0-5 were written by draft step 1, of the prompt's step and of this one, 6 by draft step 2."""
    output = drafted(attention(3, "output"), 3)
    rows = first(tmp_path, {(REQUEST, 7, output): bump()}).key_value
    assert rows is not None
    assert (rows.positions, rows.equal, rows.differ, rows.not_compared) == (7, 7, 0, 0)


def test_keys_of_a_draft_that_differ_or_were_not_compared(tmp_path: Path) -> None:
    key = attention(3, "key")
    absent = frozenset({(REQUEST, 6, drafted(key, 2))})
    changes = {
        ("r00.01", 0, drafted(key, 1)): bump(),  # of another request
        (REQUEST, 3, drafted(key, 2)): bump(),  # overwritten by the next step
        (REQUEST, 4, drafted(key, 1)): bump(),
        (REQUEST, 7, drafted(attention(3, "output"), 3)): bump(),
    }
    from localizer.diff.align import align
    from localizer.diff.compare import compare
    from localizer.diff.keyvalue import key_value_rows

    one, other = (Capture(folder) for folder in pair(tmp_path, PLAN, changes=changes, absent=absent))
    plan = align(one, other)
    columns = one.table.columns
    wanted = (columns["position"] == 7) & (columns["kind"] == schema.DRAFT_PADDING + 3)
    row = int(np.flatnonzero(wanted & (columns["request"] == 0))[0])
    found = int(np.flatnonzero(plan.candidate == row)[0])
    rows = key_value_rows(one, plan, compare(one, other, plan), found, place(DRAFT + attention(3, "output")))
    assert (rows.positions, rows.equal, rows.differ, rows.not_compared) == (7, 5, 1, 1)


def test_what_the_attention_of_a_rejected_draft_read(tmp_path: Path) -> None:
    found = first(tmp_path, {(REQUEST, 6, attention(1, "output")): bump()})
    assert (found.kind, found.blame) == ("verify-rejected", "attention")
    assert found.key_value is not None
    assert (found.key_value.positions, found.key_value.equal) == (6, 6)


# -- auxiliary hidden states -----------------------------------------------------------------------------


def test_auxiliary_hidden_states_are_not_blamed_on_the_last_layer(tmp_path: Path) -> None:
    found = first(tmp_path, {(REQUEST, 4, AUX[1]): bump()})
    assert (found.site, found.segment.after, found.blame) == (AUX[1], INPUT_IDS, "auxiliary")
    assert (found.unobserved.layers, found.unobserved.sites) == ([], [])


def test_auxiliary_hidden_states_start_no_segment(tmp_path: Path) -> None:
    found = first(tmp_path, {(REQUEST, 4, HIDDEN): bump()})
    assert (found.segment.after, found.blame) == (attention(2, "output"), "final")
    absent = frozenset({(REQUEST, 4, HIDDEN), (REQUEST, 4, AUX[0])})
    found = first(tmp_path / "logits", {(REQUEST, 4, LOGITS): put(3.0)}, absent=absent)
    assert (found.segment.after, found.blame) == (attention(2, "output"), "code-between")
    assert found.unobserved.sites == [HIDDEN]


def test_a_fault_in_a_layer_is_found_there_though_the_auxiliary_states_differ_too(tmp_path: Path) -> None:
    changes = {(REQUEST, 4, name): bump() for name in (attention(2, "query"), *AUX[1:], HIDDEN)}
    found = first(tmp_path, changes)
    assert (found.site, found.segment.after) == (attention(2, "query"), attention(1, "output"))


def test_places() -> None:
    assert place(AUX[2]).stage == INSIDE
    assert (place(AUX[2]).part, place(AUX[2]).draft) == ("2", False)
    where = place(DRAFT + attention(8, "output"))
    assert (where.stage, where.number, where.draft, where.layer) == (
        OUTPUT,
        8,
        True,
        DRAFT + "model.layers.8.self_attn.attn",
    )
