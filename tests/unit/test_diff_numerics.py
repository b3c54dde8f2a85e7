"""How two rows differ."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localizer.diff import numerics
from localizer.diff.elements import CLASSES
from localizer.diff.numerics import Detail, describe
from localizer.store.dtypes import NUMPY

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"]


def bits(dtype: str, *values: int) -> np.ndarray:
    kind = NUMPY[dtype]
    return np.array(values, np.dtype(f"u{kind.itemsize}")).view(kind)


def found(one: np.ndarray, other: np.ndarray) -> Detail:
    detail = describe(one, other)
    assert detail is not None
    return detail


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("distance", "kind"), [(1, "1-ulp"), (2, "k-ulp"), (7, "k-ulp")])
def test_units_in_the_last_place(dtype: str, distance: int, kind: str) -> None:
    one = int(bits_of(NUMPY[dtype], 1.0))
    detail = found(bits(dtype, one + distance), bits(dtype, one))
    assert (detail.class_, detail.max_ulp) == (kind, distance)


def bits_of(dtype: np.dtype, value: float) -> int:
    return int(np.array([value], dtype).view(np.dtype(f"u{dtype.itemsize}"))[0])


@pytest.mark.parametrize(("distance", "kind"), [(16, "k-ulp"), (17, "value")])
def test_sixteen_units_are_many_seventeen_are_a_value(distance: int, kind: str) -> None:
    detail = found(bits("float32", 0x3F800000 + distance), bits("float32", 0x3F800000))
    assert (detail.class_, detail.max_ulp) == (kind, distance)


@pytest.mark.parametrize("dtype", FLOATS)
def test_only_the_sign_of_a_zero(dtype: str) -> None:
    detail = found(np.array([-0.0], NUMPY[dtype]), np.array([0.0], NUMPY[dtype]))
    assert (detail.class_, detail.max_ulp, detail.max_abs, detail.max_rel) == ("signed-zero", 0, 0.0, None)


@pytest.mark.parametrize("dtype", FLOATS)
def test_distances_add_up_across_zero(dtype: str) -> None:
    sign = 1 << (8 * NUMPY[dtype].itemsize - 1)
    detail = found(bits(dtype, sign | 2), bits(dtype, 3))
    assert (detail.class_, detail.max_ulp) == ("k-ulp", 5)


@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [
        ("float32", 0x7FC00000, 0x7FC00001),
        ("float16", 0x7E00, 0xFE00),
        ("bfloat16", 0x7FC0, 0x7FC1),
        ("float8_e4m3fn", 0x7F, 0xFF),
        ("float8_e5m2", 0x7D, 0x7E),
        ("float64", 0x7FF8000000000000, 0x7FF8000000000001),
    ],
)
def test_only_the_payload_of_a_nan(dtype: str, one: int, other: int) -> None:
    detail = found(bits(dtype, one), bits(dtype, other))
    assert (detail.class_, detail.max_ulp, detail.max_abs) == ("nan-payload", None, None)
    assert describe(bits(dtype, one), bits(dtype, one)) is None


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_is_never_within_tolerance_of_a_number(dtype: str) -> None:
    detail = found(np.array([np.nan], NUMPY[dtype]), np.array([1.0], NUMPY[dtype]))
    assert (detail.class_, detail.max_ulp, detail.cosine) == ("non-finite", None, None)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
def test_an_infinity_is_not_one_unit_from_the_greatest_number(dtype: str) -> None:
    kind = NUMPY[dtype]
    greatest = np.array([ml_dtypes.finfo(kind).max], kind)
    assert found(np.array([np.inf], kind), greatest).class_ == "non-finite"
    assert found(np.array([np.inf], kind), np.array([-np.inf], kind)).class_ == "non-finite"


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_have_values_only(dtype: str) -> None:
    detail = found(np.array([1, 0], NUMPY[dtype]), np.array([1, 1], NUMPY[dtype]))
    assert (detail.class_, detail.max_ulp, detail.max_abs, detail.cosine) == ("value", None, 1.0, None)


def test_great_integers_are_subtracted_exactly() -> None:
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    detail = found(np.array([low, 5]), np.array([high, 6]))
    assert detail.max_abs == float(high - low)


def test_dtype_and_shape_come_before_values() -> None:
    one = np.zeros((2, 3), np.float32)
    assert found(one, one.astype(np.float16)).class_ == "dtype"
    assert found(one, one.reshape(3, 2)).class_ == "shape"
    assert found(one.reshape(6), one.astype(np.float16)).class_ == "dtype"


def test_the_worst_element_gives_the_class() -> None:
    parent = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    candidate = np.array([-0.0, np.nextafter(np.float32(1), np.float32(2)), 2.0, np.inf], np.float32)
    detail = found(candidate.reshape(2, 2), parent.reshape(2, 2))
    assert (detail.class_, detail.elements_differ, detail.elements) == ("non-finite", 3, 4)
    assert (detail.first_element, detail.max_ulp) == ([0, 0], 1)
    assert detail.values is not None
    assert (detail.values.candidate.decimal, detail.values.candidate.hex) == ("-0.0", "0x80000000")
    assert (detail.values.parent.decimal, detail.values.parent.hex) == ("0.0", "0x00000000")


def test_sizes_are_relative_to_the_parent_and_skip_its_zeros() -> None:
    detail = found(np.array([1.0, 3.0, 0.5]), np.array([1.0, 2.0, 0.0]))
    assert (detail.max_abs, detail.max_rel) == (1.0, 0.5)
    assert detail.cosine == pytest.approx(7 / (np.sqrt(10.25) * np.sqrt(5)))


def test_a_distance_that_overflows_is_no_number() -> None:
    greatest = np.finfo(np.float64).max
    detail = found(np.array([greatest]), np.array([-greatest]))
    assert (detail.max_abs, detail.max_rel, detail.cosine) == (None, None, -1.0)
    assert detail.max_ulp == 2 * 0x7FEFFFFFFFFFFFFF


def test_a_row_of_one_number_has_an_empty_index() -> None:
    detail = found(np.int64(3), np.int64(4))  # type: ignore[arg-type]
    assert (detail.first_element, detail.elements) == ([], 1)


@given(st.sampled_from(FLOATS + INTEGERS), st.data())
def test_any_two_bit_patterns_get_a_class(dtype: str, data: st.DataObject) -> None:
    width = 8 * NUMPY[dtype].itemsize
    top = 2 if dtype == "bool" else 1 << width
    values = st.lists(st.integers(0, top - 1), min_size=1, max_size=6)
    one = data.draw(values)
    other = data.draw(st.lists(st.integers(0, top - 1), min_size=len(one), max_size=len(one)))
    detail = describe(bits(dtype, *one), bits(dtype, *other))
    differing = [index for index in range(len(one)) if one[index] != other[index]]
    if not differing:
        assert detail is None
        return
    assert detail is not None
    assert detail.class_ in CLASSES
    assert (detail.elements_differ, detail.first_element) == (len(differing), [differing[0]])
    swapped = found(bits(dtype, *other), bits(dtype, *one))
    assert (swapped.class_, swapped.max_ulp, swapped.max_abs) == (
        detail.class_,
        detail.max_ulp,
        detail.max_abs,
    )


def test_the_worst_of_several_rows() -> None:
    rows = [Detail(class_="1-ulp", max_ulp=1), Detail(), Detail(class_="k-ulp", max_ulp=5)]
    assert numerics.worst(rows) == ("k-ulp", 5)
    assert numerics.worst([]) == (None, None)


def test_the_two_highest_logits() -> None:
    top = numerics.top_two(np.array([1.0, 5.0, 4.5, -np.inf], ml_dtypes.bfloat16))
    assert top is not None
    assert (top.top1, top.top2, top.margin, top.tie) == (1, 2, 0.5, False)


def test_tied_logits() -> None:
    top = numerics.top_two(np.array([2.0, 2.0, 1.0], np.float32))
    assert top is not None
    assert (top.top1, top.top2, top.margin, top.tie) == (0, 1, 0.0, True)


def test_logits_that_are_not_numbers() -> None:
    assert numerics.top_two(np.array([1.0, np.nan], np.float32)) is None
    assert numerics.top_two(np.array([], np.float32)) is None
    only = numerics.top_two(np.array([3.0], np.float32))
    assert only is not None
    assert (only.top1, only.top2, only.tie) == (0, None, False)
    masked = numerics.top_two(np.array([-np.inf, 3.0], np.float32))
    assert masked is not None
    assert (masked.top1, masked.top2, masked.tie) == (1, 0, False)


def test_a_flip_of_the_argmax() -> None:
    one, other = np.array([1.0, 2.0], np.float32), np.array([2.0, 2.0], np.float32)
    found = numerics.logits(one, other)
    assert found is not None
    assert found.argmax_flip
    assert (found.candidate.tie, found.parent.tie) == (False, True)
