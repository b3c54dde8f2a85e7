"""One capture against itself, and what may pair at all: properties of both alignments."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from builders import Plan, attention, bump, drafted, write
from hypothesis import given, settings
from hypothesis import strategies as st

from localizer.diff import diff_within
from localizer.diff.align import pair_rows
from localizer.diff.places import place
from localizer.diff.result import Result
from localizer.diff.within import align_within, key_value_within, pair_within, requests_within
from localizer.report.scope import scope
from localizer.store.reader import Capture, Table
from localizer.store.schema import DRAFT_PADDING

PROMPTS = ((1, 2, 3), (4, 5, 6), (1, 2, 3), (1, 2, 7, 8))
PLANS = [
    Plan(prompts=PROMPTS, matrix=(1, 4, 2), repeats=2, max_tokens=3),
    Plan(prompts=PROMPTS, matrix=(1, 2), repeats=2, chunk=2),
    Plan(prompts=PROMPTS, matrix=(1, 4), repeats=1, speculate=3, max_tokens=8),
    Plan(prompts=PROMPTS, matrix=(2, 3), repeats=1, speculate=2, max_tokens=8, method="draft_model"),
    Plan(prompts=PROMPTS, matrix=(2, 1), repeats=2, speculate=3, max_tokens=6, method="ngram"),
]


def compared(root: Path, plan: Plan | None = None, **more: Any) -> Result:
    return diff_within(Capture(write(root, replace(plan or Plan(repeats=2), **more))))


@cache
def table(index: int) -> tuple[Table, np.ndarray]:
    """The rows of a plan, in memory, with the round of each row."""
    with TemporaryDirectory() as folder:
        capture = Capture(write(Path(folder), replace(PLANS[index], layers=1)))
        whole = capture.table
        rounds = np.repeat(np.arange(len(PLANS[index].matrix) * PLANS[index].repeats), _sizes(PLANS[index]))
        taken = Table(
            {name: np.array(column) for name, column in whole.columns.items()},
            np.array(whole.prefix),
            np.array(whole.digest),
            np.array(whole.present),
        )
        return taken, rounds[taken.columns["request"]]


def _sizes(plan: Plan) -> list[int]:
    return list(plan.matrix) * plan.repeats


def picked(whole: Table, rows: np.ndarray) -> Table:
    columns = {name: column[rows] for name, column in whole.columns.items()}
    return Table(columns, whole.prefix[rows], whole.digest[rows], whole.present[rows])


def model(whole: Table, row: int) -> int:
    """0 for the target, or the draft step."""
    return max(int(whole.columns["kind"][row]) - DRAFT_PADDING, 0)


def key(whole: Table, row: int) -> tuple[bytes, int]:
    return whole.prefix[row].tobytes(), model(whole, row)


def permuted(index: int, order: list[int]) -> np.ndarray:
    """Rows of a plan with its rounds in another order."""
    _, rounds = table(index)
    return np.concatenate([np.flatnonzero(rounds == number) for number in order])


@st.composite
def orders(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """A plan, and two orders of its rounds."""
    index = draw(st.integers(0, len(PLANS) - 1))
    numbers = list(range(len(_sizes(PLANS[index]))))
    return index, draw(st.permutations(numbers)), draw(st.permutations(numbers))


@settings(deadline=None)
@given(orders(), st.booleans(), st.integers(0, 100))
def test_pairs_of_two_captures(
    found: tuple[int, list[int], list[int]], with_request: bool, missing: int
) -> None:
    """One to one, of equal key, never padding, as many as can be; the order of rounds does not matter."""
    index, one, other = found
    whole, _ = table(index)
    ours, theirs = permuted(index, one), permuted(index, other)
    theirs = np.delete(theirs, missing % len(theirs))
    left, right = pair_rows(picked(whole, ours), picked(whole, theirs), with_request=with_request)
    assert len(set(left.tolist())) == len(set(right.tolist())) == len(left)
    assert (np.diff(left) > 0).all()
    pairs = list(zip(ours[left].tolist(), theirs[right].tolist(), strict=True))
    kinds, requests = whole.columns["kind"], whole.columns["request"]
    for row, counterpart in pairs:
        assert key(whole, row) == key(whole, counterpart)
        assert DRAFT_PADDING not in (kinds[row], kinds[counterpart])
        assert not with_request or requests[row] == requests[counterpart]

    def counted(rows: np.ndarray) -> Counter[Any]:
        rows = rows[whole.prefix[rows].any(axis=1)]
        return Counter((key(whole, row), requests[row] if with_request else 0) for row in rows.tolist())

    paired = Counter((key(whole, row), requests[row] if with_request else 0) for row, _ in pairs)
    assert paired == counted(ours) & counted(theirs)
    if with_request:
        again = pair_rows(whole, picked(whole, np.sort(theirs)), with_request=True)
        assert sorted(pairs) == sorted(
            zip(again[0].tolist(), np.sort(theirs)[again[1]].tolist(), strict=True)
        )


@settings(deadline=None)
@given(orders())
def test_pairs_within_one_capture(found: tuple[int, list[int], list[int]]) -> None:
    """Every row but the first of its key pairs with that first one, whatever the order of rounds."""
    index, order, _ = found
    whole, _ = table(index)
    rows = permuted(index, order)
    later, earlier = pair_within(picked(whole, rows))
    assert len(set(later.tolist())) == len(later)
    assert (earlier < later).all()
    first: dict[tuple[bytes, int], int] = {}
    expected = [
        (place, first[key(whole, row)])
        for place, row in enumerate(rows.tolist())
        if whole.prefix[row].any() and first.setdefault(key(whole, row), place) != place
    ]
    assert list(zip(later.tolist(), earlier.tolist(), strict=True)) == expected
    assert not (whole.columns["kind"][rows[later]] == DRAFT_PADDING).any()


@pytest.mark.parametrize("index", [2, 3])
def test_a_prefix_alone_never_pairs_target_and_draft_or_padding(index: int) -> None:
    """Even in a capture whose draft rows and padding bear the prefixes of the target's rows."""
    whole, _ = table(index)
    same = np.zeros_like(whole.prefix)
    same[:, 0] = 1
    forged = Table(whole.columns, same, whole.digest, whole.present)
    later, earlier = pair_within(forged)
    left, right = pair_rows(forged, picked(forged, np.arange(len(forged))[::-1].copy()), with_request=False)
    right = len(forged) - 1 - right
    for rows, others in ((later, earlier), (left, right)):
        assert len(rows)
        assert all(
            model(forged, row) == model(forged, other) for row, other in zip(rows, others, strict=True)
        )
        kinds = forged.columns["kind"]
        assert DRAFT_PADDING not in {*kinds[rows].tolist(), *kinds[others].tolist()}


def test_rows_pair_across_requests_and_passes(tmp_path: Path) -> None:
    capture = Capture(write(tmp_path, PLANS[0]))
    plan = align_within(capture)
    assert plan.by == "within"
    assert plan.candidate_only == plan.parent_only == ()
    names = capture.requests
    columns = capture.table.columns["request"]
    pairs = {
        (names[columns[row]], names[columns[other]])
        for row, other in zip(plan.candidate, plan.parent, strict=True)
    }
    assert ("r01.02", "r00.00") in pairs  # another prompt index, the same prompt
    assert ("r01.03", "r00.00") in pairs  # another prompt that begins alike
    assert ("r04.01", "r01.01") in pairs  # a later pass


def test_requests_pair_with_the_first_of_equal_prompt(tmp_path: Path) -> None:
    capture = Capture(write(tmp_path, Plan(prompts=PROMPTS, matrix=(1, 3))))
    assert requests_within(capture) == [("r01.00", "r00.00"), ("r01.02", "r00.00")]


def test_a_consistent_source_is_identical(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert (found.verdict, found.first, found.reasons) == ("identical", None, [])
    assert found.coverage.rows.paired_by == "within"
    assert found.tokens.requests == 4
    assert found.tokens.requests_unpaired == 2
    assert any("one run" in line for line in scope(found).does_not_establish)


def test_the_first_difference_names_both_rows(tmp_path: Path) -> None:
    found = compared(tmp_path, changes={("r02.00", 4, attention(1, "query")): bump()})
    first = found.first
    assert first is not None
    assert (found.verdict, first.site, first.blame) == ("diverged", attention(1, "query"), "code-between")
    assert (first.request, first.parent_request, first.position) == ("r02.00", "r00.00", 4)
    assert first.parent_step < first.step
    assert first.class_ == "1-ulp"


def test_a_first_row_that_stands_alone_differs_from_all_later_ones(tmp_path: Path) -> None:
    found = compared(tmp_path, changes={("r00.00", 4, attention(1, "query")): bump()})
    assert [item.request for item in found.requests] == ["r01.00", "r02.00", "r03.00"]


def test_other_tokens_alone(tmp_path: Path) -> None:
    found = compared(tmp_path, only_tokens=True, outputs={"r02.00": [15, 15, 15, 15]})
    assert (found.verdict, found.first) == ("diverged", None)
    assert found.tokens.first is not None
    assert found.tokens.first.request == "r02.00"
    assert {reason.source for reason in found.reasons} == {"capture"}
    assert len(found.reasons) == len({reason.code for reason in found.reasons})


def test_what_repeats_nothing_is_inconclusive(tmp_path: Path) -> None:
    found = compared(tmp_path, repeats=1, matrix=(2,))
    assert (found.verdict, [reason.code for reason in found.reasons]) == ("inconclusive", ["nothing-repeats"])


def test_what_is_incomplete_says_so_once(tmp_path: Path) -> None:
    found = compared(tmp_path, manifest=False, absent=frozenset({("r02.00", 4, attention(1, "key"))}))
    assert found.verdict == "inconclusive"
    assert [(reason.code, reason.source) for reason in found.reasons] == [
        ("incomplete-capture", "capture"),
        ("missing-rows", "capture"),
    ]


@pytest.mark.parametrize(("planted", "differ"), [("r00.00", 1), ("r01.00", 0), ("r02.00", 1)])
def test_keys_and_values_are_those_of_the_two_requests(tmp_path: Path, planted: str, differ: int) -> None:
    """Not those of a third one, with which the rows of the earlier positions may pair."""
    changes = {("r02.00", 4, attention(1, "output")): bump(), (planted, 2, attention(1, "key")): bump()}
    capture = Capture(write(tmp_path, Plan(repeats=2, changes=changes)))
    columns = capture.table.columns
    rows = np.flatnonzero(columns["position"] == 4).tolist()
    at = {capture.requests[columns["request"][row]]: row for row in rows}
    found = key_value_within(capture, at["r02.00"], at["r00.00"], place(attention(1, "output")))
    assert (found.positions, found.equal, found.differ, found.not_compared) == (4, 4 - differ, differ, 0)


def test_drafts_pair_with_drafts(tmp_path: Path) -> None:
    plan = Plan(speculate=3, repeats=2, max_tokens=8)
    where = "r03.00", 3, drafted(attention(3, "query"), 2)
    found = compared(tmp_path, plan, changes={where: bump()})
    assert found.first is not None
    assert (found.first.request, found.first.parent_request, found.first.kind) == (
        "r03.00",
        "r00.00",
        "draft-2",
    )
    assert found.speculation is not None
    assert found.speculation.candidate == found.speculation.parent
    assert found.speculation.candidate.accepted_paired <= found.speculation.candidate.accepted_rows
