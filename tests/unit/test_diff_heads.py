"""Which heads of a row differ."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from localizer.diff import heads
from localizer.diff.numerics import Detail, describe


def found(one: np.ndarray, other: np.ndarray) -> Detail:
    detail = describe(one, other)
    assert detail is not None
    return detail


def test_each_differing_head_is_told_by_itself() -> None:
    parent = np.ones((9, 64), np.float32)
    candidate = parent.copy()
    candidate[2, :3] = np.nextafter(np.float32(1), np.float32(2))
    candidate[7, 63] = np.inf
    detail = found(candidate, parent)
    assert (detail.heads_differ, detail.heads_compared) == (2, 9)
    assert detail.heads is not None
    assert [(head.head, head.class_, head.elements_differ, head.max_ulp) for head in detail.heads] == [
        (2, "1-ulp", 3, 1),
        (7, "non-finite", 1, None),
    ]


def test_integers_have_heads_without_units() -> None:
    detail = found(np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 5]]))
    assert detail.heads is not None
    assert [(head.head, head.class_, head.max_ulp) for head in detail.heads] == [(1, "value", None)]


def test_rows_of_other_shapes_have_no_heads() -> None:
    for shape in [(), (4,), (2, 2, 2)]:
        detail = found(np.ones(shape), np.zeros(shape))
        assert (detail.heads, detail.heads_differ, detail.heads_compared) == (None, None, None)


def test_a_long_list_is_cut_and_all_are_counted() -> None:
    detail = found(np.ones((300, 2)), np.zeros((300, 2)))
    assert detail.heads is not None
    assert len(detail.heads) == heads.LISTED == 256
    assert (detail.heads_differ, detail.heads_compared) == (300, 300)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_heads_are_what_each_of_them_gives_alone(number: int, size: int, data: st.DataObject) -> None:
    bits = st.lists(st.integers(0, 0xFFFF), min_size=number * size, max_size=number * size)
    one = np.array(data.draw(bits), np.uint16)
    other = one + np.array(
        data.draw(st.lists(st.integers(0, 2), min_size=len(one), max_size=len(one))), np.uint16
    )
    ours, theirs = (row.view(np.float16).reshape(number, size) for row in (one, other))
    alone = [describe(a, b) for a, b in zip(ours, theirs, strict=True)]
    expected = [
        (index, head.class_, head.elements_differ, head.max_ulp)
        for index, head in enumerate(alone)
        if head is not None
    ]
    detail = describe(ours, theirs)
    listed = [] if detail is None else detail.heads
    assert listed is not None
    assert [(head.head, head.class_, head.elements_differ, head.max_ulp) for head in listed] == expected
