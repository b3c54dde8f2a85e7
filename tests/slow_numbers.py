"""Numbers decoded bit by bit, and two rows compared one element at a time: slow, and owing nothing to numpy.

What `localizer.diff.numerics` says of two rows must be what is computed here from the formats' definitions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from localizer.store.dtypes import NUMPY

FORMATS = {
    "float64": (11, 52),
    "float32": (8, 23),
    "float16": (5, 10),
    "bfloat16": (8, 7),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}
"""Bits of exponent and of mantissa; one more is the sign."""

INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")

NAN, INFINITY = "nan", "infinity"

ORDER = ("signed-zero", "nan-payload", "1-ulp", "k-ulp", "value", "non-finite")


def width(dtype: str) -> int:
    """Bits of an element."""
    return 8 * NUMPY[dtype].itemsize


def decode(dtype: str, word: int) -> Fraction | tuple[str, int]:
    """The number that a bit pattern stands for; ("nan", 0) or ("infinity", sign) where it is none."""
    if dtype in INTEGERS:
        signed = dtype.startswith("int") and word >> (width(dtype) - 1)
        return Fraction(word - (1 << width(dtype)) if signed else word)
    exponents, mantissas = FORMATS[dtype]
    sign = -1 if word >> (exponents + mantissas) else 1
    exponent = (word >> mantissas) % (1 << exponents)
    mantissa = word % (1 << mantissas)
    top, full = (1 << exponents) - 1, (1 << mantissas) - 1
    if dtype == "float8_e4m3fn":  # no infinities; only the last pattern of each sign is no number
        if (exponent, mantissa) == (top, full):
            return NAN, 0
    elif exponent == top:
        return (NAN, 0) if mantissa else (INFINITY, sign)
    bias = (1 << (exponents - 1)) - 1
    lead, power = (1, exponent - bias) if exponent else (0, 1 - bias)
    return sign * (lead + Fraction(mantissa, 1 << mantissas)) * Fraction(2) ** power


def steps(dtype: str, one: int, other: int) -> int:
    """How many numbers of the format lie from the one to the other, both zeros being one number."""
    places = []
    for word in (one, other):
        magnitude = word % (1 << (width(dtype) - 1))
        places.append(-magnitude if word >> (width(dtype) - 1) else magnitude)
    return abs(places[0] - places[1])


@dataclass
class Slow:
    """What `Detail` must say of two rows, sizes as exact fractions; None where there are none."""

    class_: str
    elements_differ: int
    first: int
    max_ulp: int | None
    max_abs: Fraction | None
    max_rel: Fraction | None


def kind_of(dtype: str, one: int, other: int) -> str:
    """The class of one element whose bytes differ."""
    left, right = decode(dtype, one), decode(dtype, other)
    if dtype in INTEGERS:
        return "value"
    if not isinstance(left, Fraction) or not isinstance(right, Fraction):
        return "nan-payload" if left == right == (NAN, 0) else "non-finite"
    ulps = steps(dtype, one, other)
    if ulps == 0:
        return "signed-zero"
    return "1-ulp" if ulps == 1 else "k-ulp" if ulps <= 16 else "value"


def compare(dtype: str, ours: Sequence[int], theirs: Sequence[int]) -> Slow | None:
    """Compare two rows of bit patterns; None if they are equal."""
    where = [index for index in range(len(ours)) if ours[index] != theirs[index]]
    if not where:
        return None
    kinds, ulps, gaps, relatives = [], [], [], []
    for index in where:
        kinds.append(kind_of(dtype, ours[index], theirs[index]))
        left, right = decode(dtype, ours[index]), decode(dtype, theirs[index])
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            ulps.append(steps(dtype, ours[index], theirs[index]))
            gaps.append(abs(left - right))
            if right:
                relatives.append(gaps[-1] / abs(right))
    return Slow(
        class_=max(kinds, key=ORDER.index),
        elements_differ=len(where),
        first=where[0],
        max_ulp=None if dtype in INTEGERS else max(ulps, default=None),
        max_abs=max(gaps, default=None),
        max_rel=max(relatives, default=None),
    )


def cosine(dtype: str, ours: Sequence[int], theirs: Sequence[int]) -> float | None:
    """The cosine of two rows; None where a number is not finite or a row is zero."""
    left, right = ([decode(dtype, word) for word in row] for row in (ours, theirs))
    if not all(isinstance(value, Fraction) for value in (*left, *right)):
        return None
    dot = sum(a * b for a, b in zip(left, right, strict=True))  # type: ignore[operator]
    squares = sum(a * a for a in left) * sum(b * b for b in right)  # type: ignore[operator]
    if not squares:
        return None
    magnitude = math.sqrt(Fraction(dot * dot, squares))
    return magnitude if dot > 0 else -magnitude
