"""What is said of two rows is what follows from the definitions of their formats."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import slow_numbers as slow
from hypothesis import given, settings
from hypothesis import strategies as st

from localizer.diff.elements import CLASSES, differing
from localizer.diff.numerics import Detail, describe
from localizer.store.dtypes import NUMPY

DTYPES = [*slow.FORMATS, *slow.INTEGERS]


def row(dtype: str, words: list[int]) -> np.ndarray:
    return np.array(words, np.dtype(f"u{NUMPY[dtype].itemsize}")).view(NUMPY[dtype])


def interesting(dtype: str) -> list[int]:
    """Bit patterns at the edges: zeros, denormals, the greatest numbers, infinities, NaNs, one."""
    if dtype == "bool":
        return [0, 1]
    sign = 1 << (slow.width(dtype) - 1)
    edges = [0, 1, 2, 3, sign - 1, sign - 2]
    if dtype in slow.FORMATS:
        exponents, mantissas = slow.FORMATS[dtype]
        top = ((1 << exponents) - 1) << mantissas
        one = ((1 << (exponents - 1)) - 1) << mantissas
        least = 1 << mantissas
        edges += [
            top - 1,
            top,
            top + 1,
            top + (1 << (mantissas - 1)),
            one - 1,
            one,
            one + 1,
            least - 1,
            least,
        ]
    return [edge | high for edge in edges for high in (0, sign)]


def words(dtype: str) -> st.SearchStrategy[int]:
    top = 2 if dtype == "bool" else 1 << slow.width(dtype)
    return st.one_of(st.sampled_from(interesting(dtype)), st.integers(0, top - 1))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, list[int], list[int]]:
    """Two rows of a dtype; the second is often near the first."""
    dtype = draw(st.sampled_from(DTYPES))
    top = 2 if dtype == "bool" else 1 << slow.width(dtype)
    ours = draw(st.lists(words(dtype), min_size=1, max_size=6))
    near = st.integers(-20, 20)
    theirs = [
        draw(st.one_of(words(dtype), near.map(lambda gap, word=word: (word + gap) % top)))  # type: ignore[misc]
        for word in ours
    ]
    return dtype, ours, theirs


def near(value: float | None, exact: Fraction | None) -> bool:
    """Whether a float64 is a fraction as exactly as that can be; None where it is too great."""
    if exact is None or value is None:
        return value is None and (exact is None or exact >= Fraction(2) ** 1023)
    return abs(Fraction(value) - exact) <= exact * Fraction(1, 1 << 50) + Fraction(1, 1 << 1073)


def check(found: Detail | None, dtype: str, ours: list[int], theirs: list[int]) -> None:
    expected = slow.compare(dtype, ours, theirs)
    if expected is None or found is None:
        assert found is expected
        return
    assert (found.class_, found.max_ulp) == (expected.class_, expected.max_ulp)
    assert (found.elements, found.elements_differ) == (len(ours), expected.elements_differ)
    assert found.first_element == [expected.first]
    assert near(found.max_abs, expected.max_abs), (found.max_abs, expected.max_abs)
    assert near(found.max_rel, expected.max_rel), (found.max_rel, expected.max_rel)


@settings(max_examples=600, deadline=None)
@given(pairs())
def test_every_field_follows_from_the_definition(pair: tuple[str, list[int], list[int]]) -> None:
    dtype, ours, theirs = pair
    check(describe(row(dtype, ours), row(dtype, theirs)), dtype, ours, theirs)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_pair_of_eight_bits(dtype: str) -> None:
    ours, theirs = (words.reshape(-1).tolist() for words in np.indices((256, 256)))
    found = differing(row(dtype, ours), row(dtype, theirs))
    assert found is not None
    assert found.ulps is not None
    assert len(found.where) == 256 * 255
    for place, rank, ulp, finite in zip(found.where, found.ranks, found.ulps, found.finite, strict=True):
        one, other = ours[place], theirs[place]
        assert CLASSES[rank] == slow.kind_of(dtype, one, other), (one, other)
        assert not finite or ulp == slow.steps(dtype, one, other), (one, other)


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_the_cosine_is_that_of_the_exact_numbers(pair: tuple[str, list[int], list[int]]) -> None:
    dtype, ours, theirs = pair
    found = describe(row(dtype, ours), row(dtype, theirs))
    if found is None or dtype in slow.INTEGERS:
        return
    expected = slow.cosine(dtype, ours, theirs)
    if expected is None:
        assert found.cosine is None
    else:
        assert found.cosine == pytest.approx(expected, abs=1e-6)


@settings(deadline=None)
@given(pairs())
def test_the_values_are_those_of_the_first_element(pair: tuple[str, list[int], list[int]]) -> None:
    dtype, ours, theirs = pair
    found = describe(row(dtype, ours), row(dtype, theirs))
    if found is None or found.values is None:
        return
    index = found.first_element[0] if found.first_element else 0
    for value, words in ((found.values.candidate, ours), (found.values.parent, theirs)):
        assert int(value.hex, 16) == words[index]
        assert len(value.hex) == 2 + slow.width(dtype) // 4
        exact = slow.decode(dtype, words[index])
        if isinstance(exact, Fraction):
            assert (
                Fraction(value.decimal) == exact if dtype in slow.INTEGERS else float(value.decimal) == exact
            )
        else:
            assert value.decimal in ("nan", "inf", "-inf")


def test_truth_of_a_bool_is_its_bytes() -> None:
    found = describe(row("bool", [2]), row("bool", [1]))  # both are true, but not the same byte
    assert found is not None
    assert (found.class_, found.max_abs) == ("value", 1.0)


def test_a_cosine_of_great_and_of_tiny_numbers() -> None:
    for scale in (1e200, 1e-200, 5e-324):
        found = describe(np.array([scale, scale]), np.array([2.0, 3.0]))
        assert found is not None
        assert found.cosine == pytest.approx(5 / np.sqrt(26))
