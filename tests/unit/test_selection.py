"""Which rows keep their payload."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from builders import Plan, write

from localizer.store.reader import Capture
from localizer.store.schema import Site
from localizer.store.selection import EVERYTHING, RowRule, Selection, Selector, parse
from localizer.store.writer import RankWriter

REQUESTS = {"r00.00", "r03.05"}


@pytest.mark.parametrize(
    ("rows", "transactions", "plan"),
    [
        ((), "all", EVERYTHING),
        (("all",), "all", EVERYTHING),
        (("last",), "first:2", Selection((RowRule(None, None, True),), first=2)),
        (("r03.05",), "all", Selection((RowRule("r03.05", None),))),
        (("r03.05:last",), "all", Selection((RowRule("r03.05", None, True),))),
        (
            ("r03.05:40-48,50", "r00.00:3"),
            "around:r03.05@41",
            Selection(
                (RowRule("r03.05", (range(40, 49), range(50, 51))), RowRule("r00.00", (range(3, 4),))),
                around=("r03.05", 41),
            ),
        ),
    ],
)
def test_what_options_mean(rows: tuple[str, ...], transactions: str, plan: Selection) -> None:
    assert parse(rows, transactions, REQUESTS) == plan


@pytest.mark.parametrize(
    ("rows", "transactions", "says"),
    [
        (("r09.00",), "all", "there is no request 'r09.00'"),
        (("r03.05:",), "all", "'' is neither a position nor a range"),
        (("r03.05:9-3",), "all", "the range '9-3' runs backwards"),
        (("some",), "all", "there is no request 'some'"),
        ((), "first:0", "is none of all, first:2 and around"),
        ((), "first:x", "is none of all"),
        ((), "around:r03.05", "is none of all"),
        ((), "around:r07.05@4", "there is no request 'r07.05'"),
        ((), "none", "is none of all"),
    ],
)
def test_what_options_cannot_mean(rows: tuple[str, ...], transactions: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(rows, transactions, REQUESTS)


def test_transactions_are_those_of_selected_requests() -> None:
    selector = Selector(Selection((RowRule("b", None),), first=1))
    kept = []
    for requests in (["a"], ["a", "b"], ["b"]):
        selector.begin(requests, [0] * len(requests))
        kept.append([selector.wants(request, 0, True) for request in requests])
    assert kept == [[False], [False, True], [False]]


def test_transactions_around_a_position() -> None:
    selector = Selector(Selection(around=("b", 5)))
    kept = []
    for position in range(8):
        selector.begin(["a", "b"], [9, position])
        kept.append(selector.wants("a", 9, False))
    assert kept == [False, False, False, False, True, True, True, False]


def test_digests_cover_what_payload_leaves_out(tmp_path: Path) -> None:
    folder = write(
        tmp_path, Plan(prompts=((1, 2, 3), (4, 5, 6)), matrix=(1, 2), manifest=False, only_tokens=True)
    )
    names = ["r00.00", "r01.00", "r01.01"]
    chosen = parse(["r01.01:1-2"], "all", set(names))
    rank = RankWriter(folder, 0, names, [[1, 2, 3], [1, 2, 3], [4, 5, 6]], chosen)
    rank.register([Site(name="a", rows="all"), Site(name="b", rows="logits")], None)
    rank.layout(0, "float32", ())
    rank.layout(1, "float32", ())
    rank.round({"x": "r01.00", "y": "r01.01"})
    rank.begin_step(0, ["x", "y"], [3, 3], [1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 2], [1, 1])
    rank.rows(0, 0, 6, memoryview(np.arange(6, dtype=np.float32).tobytes()))
    rank.rows(1, 0, 2, memoryview(np.arange(2, dtype=np.float32).tobytes()))
    rank.end_step({})
    summary = rank.close()
    capture = Capture(folder)
    assert summary.expected == summary.recorded == {"a": 6, "b": 2}
    assert [capture.row_payload("a", row) for row in range(6)] == [None, None, None, None, 4.0, 5.0]
    assert [capture.row_payload("b", row) for row in (2, 5)] == [None, 1.0]


def test_what_is_selected_is_selected_in_every_phase() -> None:
    """Requests are asked for by their ids in the first phase; transactions are counted in each."""
    phases = {"a": (0, "a"), "b": (0, "b"), "c": (1, "a"), "d": (1, "b")}
    first = Selector(Selection((RowRule("b", None),), first=1), phases)
    around = Selector(Selection(around=("b", 5)), phases)
    kept, near = [], []
    for requests in (["a", "b"], ["b"], ["c"], ["c", "d"], ["d"]):
        for selector, found in ((first, kept), (around, near)):
            selector.begin(requests, [5] * len(requests))
            found.append([selector.wants(request, 5, True) for request in requests])
    assert kept == [[False, True], [False], [False], [False, True], [False]]
    assert near == [[True, True], [True], [False], [True, True], [True]]
