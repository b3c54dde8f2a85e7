"""Which rows and sites pair."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import Plan, attention, pair, write
from hypothesis import given
from hypothesis import strategies as st

from localizer.diff.align import align, pair_rows, workloads_equal
from localizer.store.reader import Capture, Table

Key = tuple[int, int]
"""(request, prefix)."""


def table(keys: list[Key]) -> Table:
    prefix = np.zeros((len(keys), 16), np.uint8)
    prefix[:, 15] = [key[1] for key in keys]
    request = np.array([key[0] for key in keys], np.int32)
    nothing = np.zeros((len(keys), 0), np.bool_)
    kind = np.zeros(len(keys), np.uint8)
    return Table({"request": request, "kind": kind}, prefix, np.zeros((len(keys), 0, 16), np.uint8), nothing)


def captures(root: Path, plan: Plan | None = None, **candidate: object) -> tuple[Capture, Capture]:
    one, other = pair(root, plan, **candidate)
    return Capture(one), Capture(other)


def test_the_same_rows_in_the_same_order_pair_one_to_one(tmp_path: Path) -> None:
    plan = align(*captures(tmp_path))
    assert plan.by == "request+prefix"
    assert plan.candidate.tolist() == plan.parent.tolist() == list(range(len(plan)))
    assert not len(plan.unpaired_candidate)
    assert not len(plan.unpaired_parent)
    assert plan.candidate_sites.tolist() == plan.parent_sites.tolist() == list(range(len(plan.sites)))


def test_the_plan_can_be_printed(tmp_path: Path) -> None:
    text = repr(align(*captures(tmp_path)))
    assert text.startswith("Alignment(by='request+prefix', candidate=array([")
    assert attention(2, "output") in text


def test_the_kth_occurrence_pairs_with_the_kth() -> None:
    one = table([(0, 7), (0, 7), (0, 8), (0, 7)])
    other = table([(0, 8), (0, 7), (0, 7)])
    left, right = pair_rows(one, other, with_request=True)
    assert list(zip(left.tolist(), right.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 0)]


def test_equal_prefixes_of_other_requests_pair_only_across_workloads() -> None:
    one, other = table([(0, 7), (1, 7)]), table([(1, 7), (2, 7)])
    assert [rows.tolist() for rows in pair_rows(one, other, with_request=True)] == [[1], [0]]
    assert [rows.tolist() for rows in pair_rows(one, other, with_request=False)] == [[0, 1], [0, 1]]


def test_rows_of_unknown_prefix_never_pair() -> None:
    one = table([(0, 0), (0, 7)])
    assert [rows.tolist() for rows in pair_rows(one, one, with_request=True)] == [[1], [1]]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=30),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=30),
    st.booleans(),
)
def test_pairs_are_those_of_a_plain_loop(one: list[Key], other: list[Key], with_request: bool) -> None:
    def numbered(keys: list[Key]) -> dict[tuple[object, int], int]:
        seen: Counter[object] = Counter()
        found = {}
        for row, key in enumerate(keys):
            if key[1]:
                kind = key if with_request else key[1]
                found[kind, seen[kind]] = row
                seen[kind] += 1
        return found

    ours, theirs = numbered(one), numbered(other)
    expected = sorted((ours[key], theirs[key]) for key in ours.keys() & theirs.keys())
    left, right = pair_rows(table(one), table(other), with_request=with_request)
    assert list(zip(left.tolist(), right.tolist(), strict=True)) == expected


def test_workloads_are_equal_by_rounds_and_prompts(tmp_path: Path) -> None:
    plan = Plan(matrix=(1, 2, 1, 2))
    capture = Capture(write(tmp_path, plan))
    for index, (same, other) in enumerate(
        [
            (True, replace(plan, matrix=(1, 2), repeats=2)),
            (True, replace(plan, prompts=(*plan.prompts, (9, 9)))),
            (True, replace(plan, max_tokens=2, engine={"max_num_seqs": 1})),
            (False, replace(plan, matrix=(2, 2, 1, 2))),
            (False, replace(plan, prompts=((1, 2, 3), (4, 5, 7)))),
        ]
    ):
        other = Capture(write(tmp_path, replace(other, name=f"other{index}")))
        assert workloads_equal(capture, other) is same


def test_other_workloads_pair_by_prefix(tmp_path: Path) -> None:
    one, other = captures(tmp_path, Plan(matrix=(1, 2)), matrix=(2, 2, 2))
    plan = align(one, other)
    assert plan.by == "prefix"
    rows = [one.table.prefix[plan.candidate], other.table.prefix[plan.parent]]
    assert np.array_equal(*rows)
    assert len(plan) == len(other.table)
    assert len(plan.unpaired_candidate) == len(one.table) - len(other.table)


def test_sites_align_by_name(tmp_path: Path) -> None:
    one, other = captures(tmp_path, Plan(layers=(0, 1, 3)), layers=(1, 2))
    plan = align(one, other)
    assert attention(1, "query") in plan.sites
    assert plan.candidate_only == tuple(attention(2, kind) for kind in ("query", "key", "value", "output"))
    assert {name.split(".")[2] for name in plan.parent_only} == {"0", "3"}
    for name, column, other_column in zip(plan.sites, plan.candidate_sites, plan.parent_sites, strict=True):
        assert one.sites[column].name == other.sites[other_column].name == name


def test_empty_captures_align_to_nothing(tmp_path: Path) -> None:
    plan = align(*captures(tmp_path, only_tokens=True))
    assert (len(plan), plan.sites) == (0, ())


def test_equal_rows_are_found_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the last block or a middle one is another, the pairs are those of a whole."""
    monkeypatch.setattr("localizer.diff.align.BLOCK", 3)
    keys = [(request, prefix) for request in range(3) for prefix in range(1, 5)]
    for place in (None, 0, 5, 11):
        other = list(keys)
        if place is not None:
            other[place] = (7, 99)
        expected = [row for row in range(len(keys)) if row != place]
        pairs = pair_rows(table(keys), table(other), with_request=True)
        assert [rows.tolist() for rows in pairs] == [expected, expected]
