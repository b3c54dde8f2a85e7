"""The verdict's rules, and their order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from altered import PAYLOAD, column, forge
from builders import Plan, attention, bump, pair, write

from localizer.diff import diff
from localizer.diff.result import Both, Reason, Result, Tokens
from localizer.diff.verdict import EXIT_CODES, decide
from localizer.errors import DamagedCapture
from localizer.store.reader import Capture
from localizer.wire.spec import HIDDEN, LOGITS, TOKEN

CHANGE = {("r01.01", 4, attention(1, "query")): bump()}
TOKENS = {"r01.01": [*Plan().tokens("r01.01")[:3], 15]}
WEIGHTS = {"model.safetensors": "aa"}


def compared(root: Path, plan: Plan | None = None, **candidate: object) -> Result:
    one, other = pair(root, plan, **candidate)
    return diff(Capture(one), Capture(other))


def codes(result: Result) -> list[tuple[str, str | None]]:
    return [(reason.code, reason.source) for reason in result.reasons]


def test_identical(tmp_path: Path) -> None:
    result = compared(tmp_path, Plan(repeats=2))
    assert (result.verdict, result.first, result.reasons, result.requests) == ("identical", None, [], [])
    assert result.coverage.pairs.compared == 2 * (18 * 14 + 12 * 3)
    assert result.coverage.pairs.differ == 0
    assert result.attribution == "no-control"


def test_a_byte_is_a_divergence(tmp_path: Path) -> None:
    assert compared(tmp_path, changes=CHANGE).verdict == "diverged"


def test_a_token_is_a_divergence_though_no_compared_site_differs(tmp_path: Path) -> None:
    result = compared(tmp_path, Plan(only_tokens=True), outputs=TOKENS)
    assert (result.verdict, result.first) == ("diverged", None)
    assert codes(result) == [("no-rows", "candidate"), ("no-rows", "parent")]


def test_an_incomplete_capture_that_differs_diverges(tmp_path: Path) -> None:
    result = compared(tmp_path, changes=CHANGE, manifest=False)
    assert result.verdict == "diverged"
    assert codes(result) == [("incomplete-capture", "candidate")]
    assert result.captures.candidate.state == "incomplete"


def test_an_incomplete_capture_that_does_not_differ_is_inconclusive(tmp_path: Path) -> None:
    result = compared(tmp_path, manifest=False)
    assert (result.verdict, result.first) == ("inconclusive", None)
    assert codes(result) == [("incomplete-capture", "candidate")]
    assert "manifest" in result.reasons[0].detail


def test_the_reasons_of_a_capture_are_kept(tmp_path: Path) -> None:
    plan = Plan(state="incomplete", reasons=("one thing", "and another"))
    result = compared(tmp_path, plan)
    assert result.verdict == "inconclusive"
    assert [reason.detail for reason in result.reasons] == ["one thing", "and another"] * 2


def test_an_incomplete_capture_without_reasons_is_incomplete(tmp_path: Path) -> None:
    result = compared(tmp_path, state="incomplete")
    assert (result.verdict, codes(result)) == ("inconclusive", [("incomplete-capture", "candidate")])


def test_missing_rows_are_incomplete_whatever_the_manifest_says(tmp_path: Path) -> None:
    absent = frozenset({("r01.01", 4, attention(1, "query")), ("r01.01", 4, HIDDEN)})
    result = compared(tmp_path, absent=absent)
    assert (result.verdict, codes(result)) == ("inconclusive", [("missing-rows", "candidate")])
    assert result.reasons[0].count == 2
    assert result.coverage.pairs.missing == Both(candidate=2, parent=0)


def test_rows_that_lack_on_both_sides_are_missing_on_both(tmp_path: Path) -> None:
    result = compared(tmp_path, Plan(absent=frozenset({("r01.01", 4, LOGITS)})))
    assert codes(result) == [("missing-rows", "candidate"), ("missing-rows", "parent")]


def test_rows_without_logits_are_not_missing(tmp_path: Path) -> None:
    result = compared(tmp_path, Plan(chunk=2))
    assert (result.verdict, result.reasons) == ("identical", [])
    rows = {site.name: site.rows_compared for site in result.sites}
    assert rows[attention(0, "query")] == 18
    assert (rows[LOGITS], rows[TOKEN]) == (15, 12)


def test_logits_that_only_one_sides_chunks_ask_for_are_not_missing(tmp_path: Path) -> None:
    result = compared(tmp_path, chunk=1)
    assert (result.verdict, result.reasons) == ("identical", [])
    rows = {site.name: site.rows_compared for site in result.sites}
    assert (rows[attention(0, "query")], rows[LOGITS]) == (18, 12)


def test_sites_of_one_side_are_coverage(tmp_path: Path) -> None:
    result = compared(tmp_path, layers=(0,), observed="first")
    assert (result.verdict, result.reasons) == ("identical", [])
    assert len(result.coverage.sites.parent_only) == 8
    assert result.coverage.layers == Both(candidate="first", parent="all")


def test_past_the_first_different_token_nothing_is_compared(tmp_path: Path) -> None:
    tokens = [Plan().tokens("r00.00")[0], 15, 14, 13]
    result = compared(tmp_path, outputs={"r00.00": tokens})
    assert result.verdict == "diverged"
    assert result.coverage.rows.unpaired == Both(candidate=2, parent=2)
    assert result.coverage.rows.past_token_difference == Both(candidate=2, parent=2)
    assert {site.name for site in result.sites if site.rows_differ} == {TOKEN}


def test_other_models_are_not_compared(tmp_path: Path) -> None:
    plan = Plan(model_files=WEIGHTS)
    result = compared(tmp_path, plan, model_files={"model.safetensors": "bb"}, changes=CHANGE, outputs=TOKENS)
    assert (result.verdict, result.first, result.sites) == ("inconclusive", None, [])
    assert codes(result) == [("different-model", None)]
    assert result.coverage.pairs.compared == 0
    assert result.coverage.model_files_equal is False


@pytest.mark.parametrize(("files", "known"), [(WEIGHTS, True), ({}, None)])
def test_unknown_model_files_are_no_obstacle(tmp_path: Path, files: dict[str, str], known: bool) -> None:
    result = compared(tmp_path, Plan(model_files=WEIGHTS), model_files=files)
    assert (result.verdict, result.coverage.model_files_equal) == ("identical", known)


def test_no_common_prefix(tmp_path: Path) -> None:
    result = compared(tmp_path, prompts=((7, 8, 9), (9, 8, 7)))
    assert (result.verdict, codes(result)) == ("inconclusive", [("no-common-prefix", None)])
    assert not result.workloads_equal


def test_common_prefixes_of_other_prompts_are_compared(tmp_path: Path) -> None:
    result = compared(tmp_path, prompts=((1, 2, 9), (9, 8, 7)))
    assert result.verdict == "identical"
    assert result.coverage.rows.paired == 4
    assert result.tokens.requests == 0


def test_captures_without_taps_are_inconclusive_though_the_tokens_agree(tmp_path: Path) -> None:
    result = compared(tmp_path, Plan(only_tokens=True))
    assert (result.verdict, result.tokens.requests_differ) == ("inconclusive", 0)
    assert codes(result) == [("no-rows", "candidate"), ("no-rows", "parent")]


def test_a_killed_run_without_rows(tmp_path: Path) -> None:
    result = compared(tmp_path, only_tokens=True, manifest=False)
    assert result.verdict == "inconclusive"
    assert codes(result) == [("incomplete-capture", "candidate"), ("no-rows", "candidate")]


def test_nothing_compared(tmp_path: Path) -> None:
    where = {(name, position) for name in ("r00.00", "r01.00", "r01.01") for position in range(6)}
    sites = [site.name for site in Plan().sites()]
    result = compared(tmp_path, absent=frozenset((*place, site) for place in where for site in sites))
    assert result.verdict == "inconclusive"
    assert result.coverage.pairs.compared == 12  # the tokens, which the writer itself records
    assert codes(result) == [("missing-rows", "candidate")]


def test_a_source_that_does_not_repeat_itself_is_named_beside_the_verdict(tmp_path: Path) -> None:
    result = compared(tmp_path, Plan(repeats=2), outputs={"r03.01": [15, 15, 15, 15]})
    assert (result.verdict, codes(result)) == ("diverged", [("not-reproducible", "candidate")])


@pytest.mark.parametrize("spoilt", ["candidate", "parent"])
def test_damage_comes_first(tmp_path: Path, spoilt: str) -> None:
    one, other = pair(tmp_path, Plan(model_files=WEIGHTS), model_files={"other": "cc"})
    file = next((tmp_path / spoilt).rglob("digests-*"))
    blob = bytearray(file.read_bytes())
    blob[-1] ^= 1
    file.write_bytes(blob)
    with pytest.raises(DamagedCapture, match="digests-00000") as caught:
        diff(Capture(one), Capture(other))
    assert caught.value.exit_code == 2


def test_payload_that_contradicts_its_digest_is_damage(tmp_path: Path) -> None:
    """The candidate keeps the parent's bytes, with the digests of its own."""
    plan = Plan(payload=frozenset({attention(1, "query")}))
    one = write(tmp_path, replace(plan, changes=CHANGE))
    other = write(tmp_path, replace(plan, name="parent"))
    forge(one, PAYLOAD, arrays={attention(1, "query"): column(other, PAYLOAD, attention(1, "query"))})
    with pytest.raises(DamagedCapture, match="does not have its digest"):
        diff(Capture(one), Capture(other))


TOKEN_PARITY = Tokens(
    requests=1,
    requests_differ=0,
    positions=4,
    positions_differ=0,
    prompts_equal=True,
    repeats_equal=None,
    first=None,
    paired_by="request",
    requests_unpaired=0,
    requests_unfinished=0,
)
OTHER_MODEL, INCOMPLETE, UNSTEADY = (
    Reason(code=code) for code in ("different-model", "incomplete-capture", "not-reproducible")
)


@pytest.mark.parametrize(
    ("obstacle", "incomplete", "unsteady", "tokens", "differ", "verdict"),
    [
        ([OTHER_MODEL], [INCOMPLETE], [], 1, 5, "inconclusive"),
        ([OTHER_MODEL], [], [], 0, 0, "inconclusive"),
        ([], [INCOMPLETE], [UNSTEADY], 1, 0, "diverged"),
        ([], [INCOMPLETE], [], 0, 1, "diverged"),
        ([], [INCOMPLETE], [], 0, 0, "inconclusive"),
        ([], [], [UNSTEADY], 0, 0, "identical"),
        ([], [], [], 0, 0, "identical"),
    ],
)
def test_the_order_of_the_rules(
    obstacle: list[Reason],
    incomplete: list[Reason],
    unsteady: list[Reason],
    tokens: int,
    differ: int,
    verdict: str,
) -> None:
    import msgspec

    parity = msgspec.structs.replace(TOKEN_PARITY, positions_differ=tokens)
    found, reasons = decide(obstacle, incomplete, unsteady, parity, differ)
    assert found == verdict
    assert reasons == [*obstacle, *incomplete, *([] if obstacle else unsteady)]


def test_exit_codes() -> None:
    assert EXIT_CODES == {"identical": 0, "diverged": 1, "inconclusive": 3}
