"""Where the first difference enters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from builders import Change, Plan, Where, attention, bump, pair, put, toy_token, write

from localizer.diff import diff, localize
from localizer.diff.result import Finding, Result
from localizer.store.reader import Capture
from localizer.store.schema import MANIFEST, Manifest, decode, encode
from localizer.wire.spec import HIDDEN, INPUT_IDS, LOGITS, POSITIONS, TOKEN

REQUEST = "r01.01"
PROMPT = 3


def compared(root: Path, plan: Plan | None = None, **candidate: object) -> Result:
    one, other = pair(root, plan, **candidate)
    return diff(Capture(one), Capture(other))


def first(root: Path, changes: dict[Where, Change], plan: Plan | None = None) -> Finding:
    found = compared(root, plan, changes=changes).first
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("site", "after", "blame"),
    [
        (INPUT_IDS, None, "inputs"),
        (POSITIONS, None, "inputs"),
        (attention(0, "query"), INPUT_IDS, "code-between"),
        (attention(0, "key"), INPUT_IDS, "code-between"),
        (attention(1, "query"), attention(0, "output"), "code-between"),
        (attention(1, "key"), attention(0, "output"), "code-between"),
        (attention(1, "value"), attention(0, "output"), "code-between"),
        (attention(0, "output"), attention(0, "value"), "attention"),
        (attention(2, "output"), attention(2, "value"), "attention"),
        (HIDDEN, attention(2, "output"), "final"),
        (LOGITS, HIDDEN, "lm-head"),
    ],
)
def test_the_segment_of_every_site(tmp_path: Path, site: str, after: str | None, blame: str) -> None:
    change = put(7, ()) if site in (INPUT_IDS, POSITIONS) else bump((0,))
    found = first(tmp_path, {(REQUEST, 4, site): change})
    assert (found.site, found.segment.before) == (site, site)
    assert (found.segment.after, found.blame) == (after, blame)
    assert (found.request, found.position, found.kind, found.step) == (REQUEST, 4, "decode", 6)
    assert (found.unobserved.layers, found.unobserved.sites) == ([], [])


def test_equal_logits_and_another_token_blame_the_sampler(tmp_path: Path) -> None:
    token = toy_token([4, 5, 6])
    found = compared(tmp_path, outputs={REQUEST: [token, 15, 15, 15]}).first
    assert found is not None
    assert (found.site, found.segment.after, found.blame) == (TOKEN, LOGITS, "sampler")
    assert found.position == PROMPT
    assert found.values is not None
    assert found.values.candidate.decimal == "15"


def test_a_prompt_row_is_found_without_its_logits(tmp_path: Path) -> None:
    found = first(tmp_path, {(REQUEST, 1, attention(2, "query")): bump((2, 3), 5)})
    assert (found.position, found.kind, found.first_element) == (1, "prefill", [2, 3])
    assert (found.class_, found.max_ulp, found.elements_differ, found.elements) == ("k-ulp", 5, 1, 12)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("r00.00", 4, attention(2, "output")), ("r01.00", 0, attention(0, "query"))),  # step
        (("r01.00", 5, attention(2, "output")), ("r01.01", 5, attention(0, "query"))),  # request
        (("r01.00", 0, attention(2, "output")), ("r01.00", 1, attention(0, "query"))),  # position
        (("r01.00", 1, attention(1, "key")), ("r01.00", 1, attention(1, "value"))),  # execution order
    ],
)
def test_causal_order(tmp_path: Path, one: Where, other: Where) -> None:
    result = compared(tmp_path, changes={other: bump(), one: bump()})
    assert result.first is not None
    assert (result.first.request, result.first.position, result.first.site) == one
    assert result.rows.cause is not None
    assert (result.rows.cause.request, result.rows.cause.position, result.rows.cause.site) == one


def test_the_candidates_steps_count(tmp_path: Path) -> None:
    changes = {("r00.00", 2, attention(0, "query")): bump(), ("r01.00", 0, attention(0, "query")): bump()}
    found = compared(tmp_path, changes=changes, chunk=1).first
    assert found is not None
    assert (found.request, found.step, found.parent_step) == ("r00.00", 2, 0)
    assert found.kind == "prefill-chunk"


def test_each_request_has_its_own_first(tmp_path: Path) -> None:
    changes = {
        ("r01.00", 4, attention(1, "query")): bump(),
        ("r01.00", 5, attention(0, "query")): bump(),
        ("r00.00", 5, attention(2, "output")): bump(),
    }
    result = compared(tmp_path, changes=changes)
    firsts = [(item.request, item.first.position, item.first.site) for item in result.requests]
    assert firsts == [("r00.00", 5, attention(2, "output")), ("r01.00", 4, attention(1, "query"))]
    assert all(item.first.class_ == "1-ulp" for item in result.requests)


def test_payload_of_the_later_requests_is_not_read_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(localize, "DETAILED_REQUESTS", 1)
    changes = {(name, 4, attention(1, "query")): bump() for name in ("r00.00", "r01.00", "r01.01")}
    classes = [item.first.class_ for item in compared(tmp_path, changes=changes).requests]
    assert classes == ["1-ulp", None, None]


def test_what_lies_inside_the_segments_of_later_requests_is_not_told_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may hold a high number of a layer, and there may be many requests."""
    monkeypatch.setattr(localize, "DETAILED_REQUESTS", 1)
    plan = Plan(layers=(0, 9000), observed="0,9000")
    changes = {(name, 4, attention(9000, "query")): bump() for name in ("r00.00", "r01.00", "r01.01")}
    found = [item.first.unobserved.layers for item in compared(tmp_path, plan, changes=changes).requests]
    assert [len(layers) for layers in found] == [8999, 0, 0]


def test_earlier_positions_are_not_looked_at_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(localize, "READ_POSITIONS", 10)
    changes = {(name, 4, attention(1, "output")): bump() for name in ("r00.00", "r01.00", "r01.01")}
    result = compared(tmp_path, changes=changes)
    found = [item.first.key_value for item in result.requests]
    assert [(rows.positions, rows.equal, rows.not_compared) for rows in found if rows is not None] == [
        *((4, 4, 0), (4, 0, 4), (4, 0, 4))
    ]


def test_selected_layers_leave_the_others_inside_the_segment(tmp_path: Path) -> None:
    plan = Plan(layers=(1, 4), observed="1,4")
    found = first(tmp_path, {(REQUEST, 4, attention(4, "query")): bump()}, plan)
    assert found.segment.after == attention(1, "output")
    assert (found.unobserved.layers, found.unobserved.later_layers) == ([2, 3], False)


def test_layers_before_the_first_selected_one(tmp_path: Path) -> None:
    plan = Plan(layers=(2,), observed="2")
    found = first(tmp_path, {(REQUEST, 4, attention(2, "value")): bump()}, plan)
    assert (found.segment.after, found.unobserved.layers) == (INPUT_IDS, [0, 1])


def test_layers_after_the_last_selected_one(tmp_path: Path) -> None:
    plan = Plan(layers=(0,), observed="first")
    found = first(tmp_path, {(REQUEST, 4, HIDDEN): bump()}, plan)
    assert (found.segment.after, found.blame) == (attention(0, "output"), "final")
    assert found.unobserved.later_layers


def test_a_missing_site_lengthens_the_segment(tmp_path: Path) -> None:
    where = REQUEST, 4
    found = compared(
        tmp_path,
        changes={(*where, attention(2, "query")): bump()},
        absent=frozenset({(*where, attention(1, "output"))}),
    ).first
    assert found is not None
    assert found.segment.after == attention(1, "value")
    assert found.blame == "code-between"
    assert found.unobserved.sites == [attention(1, "output")]


def test_a_missing_layer_lies_inside_the_segment(tmp_path: Path) -> None:
    where = REQUEST, 4
    absent = {(*where, attention(1, kind)) for kind in ("query", "key", "value", "output")}
    found = compared(
        tmp_path, changes={(*where, attention(2, "key")): bump()}, absent=frozenset(absent)
    ).first
    assert found is not None
    assert found.segment.after == attention(0, "output")
    assert found.unobserved.layers == [1]
    assert len(found.unobserved.sites) == 4


def test_an_attention_whose_key_was_not_compared(tmp_path: Path) -> None:
    where = REQUEST, 4
    absent = frozenset({(*where, attention(1, "key")), (*where, attention(1, "value"))})
    found = compared(tmp_path, changes={(*where, attention(1, "output")): bump()}, absent=absent).first
    assert found is not None
    assert (found.segment.after, found.blame) == (attention(1, "query"), "attention")
    assert found.unobserved.sites == [attention(1, "key"), attention(1, "value")]


def test_nothing_upstream(tmp_path: Path) -> None:
    absent = {(REQUEST, 4, name) for name in (INPUT_IDS, POSITIONS)}
    absent |= {(REQUEST, 4, attention(0, kind)) for kind in ("query", "key", "value")}
    found = compared(
        tmp_path, changes={(REQUEST, 4, attention(0, "output")): bump()}, absent=frozenset(absent)
    ).first
    assert found is not None
    assert (found.segment.after, found.blame) == (None, "unobserved")


def test_key_and_value_rows_of_earlier_positions_are_equal(tmp_path: Path) -> None:
    found = first(tmp_path, {(REQUEST, 4, attention(1, "output")): bump()})
    assert found.key_value is not None
    rows = found.key_value
    assert (rows.positions, rows.equal, rows.differ, rows.not_compared) == (4, 4, 0, 0)


def test_key_and_value_rows_that_were_not_compared(tmp_path: Path) -> None:
    absent = frozenset({(REQUEST, 1, attention(1, "key"))})
    rows = compared(tmp_path, changes={(REQUEST, 4, attention(1, "output")): bump()}, absent=absent)
    assert rows.first is not None
    assert rows.first.key_value is not None
    found = rows.first.key_value
    assert (found.positions, found.equal, found.differ, found.not_compared) == (4, 3, 0, 1)


def test_key_and_value_rows_of_other_requests_stand_in(tmp_path: Path) -> None:
    """What a prefix-cache hit reads was written by an earlier request."""
    absent = frozenset({("r01.00", 1, attention(1, "key"))})
    changes = {
        ("r00.00", 1, attention(1, "key")): bump(),
        ("r01.00", 4, attention(1, "output")): bump(),
    }
    result = compared(tmp_path, changes=changes, absent=absent)
    found = result.requests[1].first.key_value
    assert result.requests[1].request == "r01.00"
    assert found is not None
    assert (found.positions, found.equal, found.differ, found.not_compared) == (4, 3, 1, 0)


def test_cause_amplifier_and_symptom_are_three_places(tmp_path: Path) -> None:
    tokens = [toy_token([4, 5, 6]), 0, 3, 3]
    flip = put(9.0, (0,))
    changes = {
        (REQUEST, 1, attention(1, "query")): bump(),
        (REQUEST, 2, LOGITS): bump((5,)),
        (REQUEST, 3, LOGITS): flip,
    }
    rows = compared(tmp_path, changes=changes, outputs={REQUEST: tokens}).rows
    assert rows.cause is not None
    assert (rows.cause.request, rows.cause.position, rows.cause.step) == (REQUEST, 1, 4)
    assert rows.amplifier is not None
    assert (rows.amplifier.request, rows.amplifier.position, rows.amplifier.step) == (REQUEST, 3, 5)
    assert rows.amplifier.logits.argmax_flip
    assert (rows.amplifier.logits.candidate.top1, rows.amplifier.logits.candidate.top1_value) == (0, 9.0)
    assert rows.symptom is not None
    assert (rows.symptom.request, rows.symptom.position, rows.symptom.output_index) == (REQUEST, 4, 1)
    assert (rows.symptom.step, rows.symptom.logits) == (5, rows.amplifier.logits)


def test_without_logits_payload_there_is_no_amplifier(tmp_path: Path) -> None:
    plan = Plan(payload=frozenset({attention(0, "query")}))
    result = compared(tmp_path, plan, changes={(REQUEST, 3, LOGITS): put(9.0)})
    assert result.rows.amplifier is None
    assert result.first is not None
    assert result.first.logits is None
    assert (result.first.class_, result.first.first_element, result.first.elements) == (None, None, 16)


def test_first_at_the_logits_shows_the_two_highest(tmp_path: Path) -> None:
    found = first(tmp_path, {(REQUEST, 3, LOGITS): put(4.0, (0,))})
    assert found.logits is not None
    assert found.logits.candidate.tie
    assert (found.logits.candidate.top1, found.logits.parent.tie) == (0, False)


@pytest.mark.parametrize(
    ("layout", "kind"), [(("float16", (3, 4)), "dtype"), (("bfloat16", (4, 3)), "shape")]
)
def test_another_layout_is_a_finding(tmp_path: Path, layout: tuple[str, tuple[int, ...]], kind: str) -> None:
    site = attention(1, "query")
    result = compared(tmp_path, layouts={site: layout})
    assert result.first is not None
    assert (result.first.site, result.first.class_, result.first.position) == (site, kind, 0)
    row = next(item for item in result.sites if item.name == site)
    assert row.rows_differ == row.rows_compared


def test_equal_bytes_of_another_shape_differ(tmp_path: Path) -> None:
    site = attention(0, "query")
    ones = {
        (name, position, site): lambda row: np.ones_like(row) for name in ("r00.00",) for position in range(6)
    }
    plan = Plan(matrix=(1,), changes=ones)
    other = replace(plan, name="other", layouts={site: ("bfloat16", (12,))})
    result = diff(Capture(write(tmp_path, plan)), Capture(write(tmp_path, other)))
    assert result.first is not None
    assert (result.first.site, result.first.class_) == (site, "shape")


def test_the_table_of_sites(tmp_path: Path) -> None:
    site = attention(1, "output")
    changes = {
        (REQUEST, 3, site): bump(),
        (REQUEST, 4, site): bump((1,), 9),
        ("r00.00", 4, site): put(np.nan),
    }
    result = compared(tmp_path, changes=changes)
    rows = {item.name: item for item in result.sites}
    assert next(iter(rows)) == INPUT_IDS
    assert (rows[site].rows_compared, rows[site].rows_differ, rows[site].rows_read) == (18, 3, 3)
    assert (rows[site].class_, rows[site].max_ulp) == ("non-finite", 9)
    assert (rows[HIDDEN].rows_compared, rows[HIDDEN].rows_differ, rows[HIDDEN].class_) == (12, 0, None)


def test_a_number_too_great_for_a_layer_is_not_counted_to() -> None:
    from localizer.diff.places import place

    assert place("model.layers.99999999999.attn/query").number is None
    assert place("model.layers.3.attn/query").number == 3


def test_layers_without_a_tap_may_lie_inside_the_segment(tmp_path: Path) -> None:
    """A model with other mixers than attention: nothing seen between its ends is not nothing there."""
    one, other = pair(tmp_path, Plan(layers=(0,)), changes={(REQUEST, 4, HIDDEN): bump()})
    for folder in (one, other):
        manifest = decode(folder / MANIFEST, Manifest)
        changed = msgspec.structs.replace(manifest, untapped={"model.layers.1.mixer": "Mixer"})
        (folder / MANIFEST).write_bytes(encode(changed))
    found = diff(Capture(one), Capture(other)).first
    assert found is not None
    assert (found.site, found.unobserved.later_layers) == (HIDDEN, True)
