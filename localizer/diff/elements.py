"""The elements of two rows whose bytes differ, and what the bytes mean in their dtype."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SIGNED_ZERO, NAN_PAYLOAD, ONE_ULP, K_ULP, VALUE, NON_FINITE, SHAPE, DTYPE = CLASSES = (
    "signed-zero", "nan-payload", "1-ulp", "k-ulp", "value", "non-finite", "shape", "dtype",
)  # fmt: skip
"""Classes of a difference, the mildest first; that of a row is the worst of its elements."""

MANY_ULP = 16
"""Greatest distance of class k-ulp."""


@dataclass(frozen=True)
class Elements:
    """The elements of two rows of one dtype and shape whose bytes differ.

    Attributes:
        where: int64 [n], their indices in the flat rows, ascending; never empty.
        candidate, parent: [n], their values in the rows' dtype, those of `bool` as bytes.
        ranks: int64 [n], of each the index of its class in `CLASSES`.
        ulps: uint64 [n], distances in units in the last place, of meaning where `finite`; None for integers.
        finite: bool [n], finite on both sides.
    """

    where: np.ndarray
    candidate: np.ndarray
    parent: np.ndarray
    ranks: np.ndarray
    ulps: np.ndarray | None
    finite: np.ndarray


def differing(candidate: np.ndarray, parent: np.ndarray) -> Elements | None:
    """The elements that differ between two rows of one dtype and shape; None if all bytes are equal."""
    ours, theirs = _bits(candidate), _bits(parent)
    where = np.flatnonzero(ours != theirs)
    if not len(where):
        return None
    one, other = candidate.reshape(-1)[where], parent.reshape(-1)[where]
    if is_float(candidate.dtype):
        return Elements(where, one, other, *_rank(one, other, ours[where], theirs[where]))
    if candidate.dtype == np.bool_:
        one, other = one.view(np.uint8), other.view(np.uint8)
    ranks = np.full(len(where), CLASSES.index(VALUE))
    return Elements(where, one, other, ranks, None, np.ones(len(where), np.bool_))


def distances(found: Elements) -> np.ndarray:
    """Absolute differences of the finite elements: float64 [finite], exact uint64 for integers."""
    one, other = found.candidate[found.finite], found.parent[found.finite]
    if found.ulps is None:  # the difference of two integers always fits, whatever their width
        return np.maximum(one, other).astype(np.uint64) - np.minimum(one, other).astype(np.uint64)
    with np.errstate(all="ignore"):
        return np.abs(wide(one) - wide(other))


def greatest_ulp(found: Elements, among: slice = slice(None)) -> int | None:
    """The greatest ULP distance of `among` the elements; None for integers, and where none is finite."""
    if found.ulps is None:
        return None
    ulps = found.ulps[among][found.finite[among]]
    return int(ulps.max()) if len(ulps) else None


def worst_class(found: Elements, among: slice = slice(None)) -> str:
    """The worst class of some of the elements, of at least one."""
    return CLASSES[int(found.ranks[among].max())]


def is_float(dtype: np.dtype) -> bool:
    """Whether elements are floating-point numbers, fp8 included."""
    return dtype.kind not in "iub"  # ml_dtypes' types are of kind V or f


def _bits(array: np.ndarray) -> np.ndarray:
    """The elements' bytes as flat unsigned integers."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.dtype(f"u{flat.dtype.itemsize}"))


def wide(array: np.ndarray) -> np.ndarray:
    """The numbers as float64, exact for all floats."""
    with np.errstate(all="ignore"):
        return array.astype(np.float64)


def _rank(
    one: np.ndarray, other: np.ndarray, bits: np.ndarray, other_bits: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(index in `CLASSES`, ULP distance, both finite) of floats whose bytes differ, each [elements]."""
    left, right = wide(one), wide(other)
    finite = np.isfinite(left) & np.isfinite(right)
    width = 8 * bits.dtype.itemsize
    magnitude = np.uint64((1 << (width - 1)) - 1)
    ours, theirs = bits.astype(np.uint64), other_bits.astype(np.uint64)
    size, other_size = ours & magnitude, theirs & magnitude
    same_sign = (ours > magnitude) == (theirs > magnitude)
    # floats of one sign are ordered as their bits are; across zero the distances to it add up
    apart = np.maximum(size, other_size) - np.minimum(size, other_size)
    ulps = np.where(same_sign, apart, size + other_size)
    ranks = np.select(
        [np.isnan(left) & np.isnan(right), ~finite, ulps == 0, ulps == 1, ulps <= MANY_ULP],
        [CLASSES.index(name) for name in (NAN_PAYLOAD, NON_FINITE, SIGNED_ZERO, ONE_ULP, K_ULP)],
        CLASSES.index(VALUE),
    )
    return ranks, ulps, finite
