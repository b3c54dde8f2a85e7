"""The contents of a buffer are told in order, and nothing overlaps."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localizer.hooks.pack import Message, Packing, Run, Value, pieces
from localizer.wire.ring import ALIGN


def test_rows_that_follow_each_other_share_a_run() -> None:
    packing = Packing(1 << 12, 1 << 12)
    places = [packing.rows([site], 0, 3, 40) for site in (4, 5)]
    packing.message({"type": "draft"})
    places.append(packing.rows([4], 0, 1, 40))
    assert places == [0, 128, 256]
    first, message, second = packing.items
    assert isinstance(first, Run)
    assert isinstance(second, Run)
    assert (first.begin, first.end, first.table) == (0, 248, [4, 0, 3, 40, 40, 0, 5, 0, 3, 40, 40, 128])
    assert message == Message({"type": "draft"})
    assert (second.begin, second.end, second.table) == (256, 296, [4, 0, 1, 40, 40, 0])


def test_rows_of_several_sites_lie_side_by_side() -> None:
    packing = Packing(1 << 12, 1 << 12)
    assert (packing.rows([9], 0, 1, 8), packing.rows([4, 5], 0, 3, 40)) == (0, 64)
    (run,) = packing.items
    assert isinstance(run, Run)
    assert (run.table[6:], run.end) == ([4, 0, 3, 40, 40, 64, 5, 0, 3, 40, 40, 184], 64 + 240)


def test_a_run_has_an_end() -> None:
    packing = Packing(1 << 12, 256)
    for site in range(3):
        packing.rows([site], 0, 1, 128)
    assert [(item.begin, item.end) for item in packing.items if isinstance(item, Run)] == [
        (0, 256),
        (256, 384),
    ]


def test_a_full_buffer_says_so_and_takes_nothing() -> None:
    packing = Packing(128, 128)
    assert packing.rows([0], 0, 1, 100) == 0
    assert (packing.rows([1], 0, 1, 1), packing.value(None, 1, "int64", ())) == (None, None)
    assert (len(packing.items), packing.used) == (1, 128)


sizes = st.tuples(st.sampled_from(["rows", "value", "message"]), st.integers(1, 9), st.integers(0, 200))


@given(st.lists(sizes, max_size=40), st.integers(64, 4096))
def test_nothing_overlaps(contents: list[tuple[str, int, int]], longest: int) -> None:
    packing = Packing(4096, longest)
    taken: list[tuple[int, int]] = []
    for kind, count, width in contents:
        if kind == "message":
            packing.message({})
            continue
        size = count * width
        place = packing.rows([0], 0, count, width) if kind == "rows" else packing.value(None, size, "", ())
        if place is not None:
            taken.append((place, place + size))
    for (begin, end), (after, _) in pairwise(taken):
        assert begin % ALIGN == 0
        assert end <= after
    assert all(end <= 4096 for _, end in taken)
    told = []
    for item in packing.items:
        if isinstance(item, Value):
            told.append((item.offset, item.offset + item.size))
        elif isinstance(item, Run):
            for at in range(0, len(item.table), 6):
                _, _, count, width, pace, offset = item.table[at : at + 6]
                assert pace == width
                told.append((item.begin + offset, item.begin + offset + count * width))
                assert item.end >= told[-1][1]
    assert told == taken


@pytest.mark.parametrize(
    ("count", "width", "most", "expected"),
    [
        (5, 10, 100, [(0, 5)]),
        (5, 10, 25, [(0, 2), (2, 2), (4, 1)]),
        (2, 50, 10, [(0, 1), (1, 1)]),
        (3, 0, 10, [(0, 3)]),
        (0, 8, 10, []),
    ],
)
def test_pieces(count: int, width: int, most: int, expected: list[tuple[int, int]]) -> None:
    assert list(pieces(count, width, most)) == expected
