"""Token parity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import Plan, pair, write

from localizer.diff import diff
from localizer.diff.result import Both, Tokens
from localizer.diff.tokens import DecidingSteps
from localizer.store.reader import Capture

EIGHT = tuple((index, index + 1, index + 2) for index in range(1, 9))


def parity(root: Path, plan: Plan | None = None, **candidate: object) -> Tokens:
    one, other = pair(root, plan, **candidate)
    return diff(Capture(one), Capture(other)).tokens


def test_equal_tokens(tmp_path: Path) -> None:
    found = parity(tmp_path)
    assert (found.requests, found.requests_differ, found.positions, found.positions_differ) == (3, 0, 12, 0)
    assert (found.prompts_equal, found.repeats_equal, found.first) == (True, None, None)
    assert found.paired_by == "request"


def test_positions_are_absolute_and_count_from_the_prompt(tmp_path: Path) -> None:
    tokens = Plan().tokens("r01.01")
    found = parity(tmp_path, outputs={"r01.01": [*tokens[:2], 15, tokens[3]]})
    assert (found.requests_differ, found.positions_differ) == (1, 1)
    assert found.first is not None
    assert (found.first.request, found.first.position, found.first.output_index) == ("r01.01", 5, 2)


@pytest.mark.parametrize(("length", "differ"), [(1, 3), (3, 1), (6, 2)])
def test_every_missing_position_differs(tmp_path: Path, length: int, differ: int) -> None:
    tokens = [*Plan().tokens("r00.00"), 2, 3][:length]
    found = parity(tmp_path, outputs={"r00.00": tokens})
    assert (found.positions, found.positions_differ) == (8 + max(4, length), differ)
    assert found.first is not None
    assert found.first.output_index == min(4, length)


def test_the_first_difference_is_the_earliest_decided(tmp_path: Path) -> None:
    """r01.01 differs in an earlier step than r01.00; r00.00 differs later, but in an earlier round."""
    changed = {
        "r01.00": [*Plan().tokens("r01.00")[:3], 15],
        "r01.01": [*Plan().tokens("r01.01")[:1], 15, 15, 15],
    }
    found = parity(tmp_path, outputs=changed).first
    assert found is not None
    assert (found.request, found.output_index) == ("r01.01", 1)
    changed["r00.00"] = [*Plan().tokens("r00.00")[:3], 15]
    found = parity(tmp_path / "more", outputs=changed).first
    assert found is not None
    assert (found.request, found.output_index) == ("r00.00", 3)


def test_without_rows_requests_decide_the_order(tmp_path: Path) -> None:
    changed = {"r01.00": [2, 15, 15, 15], "r01.01": [15, 15, 15, 15]}
    found = parity(tmp_path, Plan(only_tokens=True), outputs=changed).first
    assert found is not None
    assert (found.request, found.output_index) == ("r01.00", 0)


def test_other_matrices_pair_by_prompt_and_order(tmp_path: Path) -> None:
    plan = Plan(prompts=EIGHT, matrix=(1, 2))
    found = parity(tmp_path, plan, matrix=(2, 2))
    assert (found.paired_by, found.requests, found.requests_unpaired) == ("prompt", 3, 1)
    assert (found.requests_differ, found.prompts_equal) == (0, True)


def test_equal_prompts_pair_in_the_order_of_appearance(tmp_path: Path) -> None:
    plan = Plan(prompts=EIGHT, matrix=(1, 1))
    found = parity(tmp_path, plan, matrix=(1, 1, 2), outputs={"r01.00": [15, 15, 15, 15]})
    assert (found.requests, found.requests_differ, found.requests_unpaired) == (2, 1, 2)
    assert found.first is not None
    assert found.first.request == "r01.00"


def test_other_prompts(tmp_path: Path) -> None:
    found = parity(tmp_path, prompts=((1, 2, 3), (4, 5, 7)))
    assert (found.prompts_equal, found.paired_by) == (False, "prompt")
    assert (found.requests, found.requests_unpaired) == (2, 1)


def test_repeats_of_each_source(tmp_path: Path) -> None:
    plan = Plan(repeats=2)
    assert parity(tmp_path, plan).repeats_equal == Both(candidate=True, parent=True)
    found = parity(tmp_path / "other", plan, outputs={"r03.01": [15, 15, 15, 15]})
    assert found.repeats_equal == Both(candidate=False, parent=True)


def test_one_pass_says_nothing_about_repeats(tmp_path: Path) -> None:
    assert parity(tmp_path, Plan(repeats=2), repeats=1).repeats_equal == Both(candidate=None, parent=True)


def test_a_killed_run_is_compared_as_far_as_it_went(tmp_path: Path) -> None:
    plan = Plan()
    cut = {"r01.00": plan.tokens("r01.00")[:2], "r01.01": plan.tokens("r01.01")[:1]}
    found = parity(tmp_path, plan, outputs=cut, manifest=False)
    assert (found.requests_differ, found.positions_differ) == (0, 0)
    assert (found.positions, found.requests_unfinished) == (7, 3)


def test_an_aborted_request_is_compared_as_far_as_it_went(tmp_path: Path) -> None:
    cut = {"r01.00": Plan().tokens("r01.00")[:2]}
    found = parity(tmp_path, outputs=cut, unfinished=frozenset({"r01.00"}))
    assert (found.positions, found.positions_differ, found.requests_unfinished) == (10, 0, 1)


def test_the_deciding_row_of_a_token(tmp_path: Path) -> None:
    capture = Capture(write(tmp_path, Plan(chunk=2)))
    steps = DecidingSteps(capture)
    columns = capture.table.columns
    for output in range(4):
        row = steps.row("r01.01", output)
        assert row is not None
        assert capture.requests[columns["request"][row]] == "r01.01"
        assert columns["position"][row] == 3 + output - 1
        assert columns["sampled"][row] == capture.outputs["r01.01"][output]
    assert steps.row("r01.01", 4) is None


def test_no_requests(tmp_path: Path) -> None:
    found = parity(tmp_path, replace(Plan(), matrix=()))
    assert (found.requests, found.positions, found.first) == (0, 0, None)
