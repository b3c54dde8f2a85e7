"""How two rows of the same site differ: bytes first, then what the bytes mean in their dtype."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localizer.diff.result import Both, Logits, TopTwo, Value

SIGNED_ZERO, NAN_PAYLOAD, ONE_ULP, K_ULP, VALUE, NON_FINITE, SHAPE, DTYPE = CLASSES = (
    "signed-zero", "nan-payload", "1-ulp", "k-ulp", "value", "non-finite", "shape", "dtype",
)  # fmt: skip
"""Classes of a difference, the mildest first; that of a row is the worst of its elements."""

MANY_ULP = 16
"""Greatest distance of class k-ulp."""


@dataclass(frozen=True)
class Detail:
    """How two rows differ.

    Attributes:
        class_: one of `CLASSES`; None where payload is needed and absent.
        elements, elements_differ: None where the shapes differ or payload is absent.
        first_element: index of the first differing element, in the shape of the row.
        max_ulp: greatest distance in units in the last place; None for integers.
        max_abs, max_rel, cosine: None where not finite or not meant for the dtype.
        values: the first differing element on both sides.
    """

    class_: str | None = None
    elements: int | None = None
    elements_differ: int | None = None
    first_element: list[int] | None = None
    max_ulp: int | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    cosine: float | None = None
    values: Both[Value] | None = None


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


def describe(candidate: np.ndarray, parent: np.ndarray) -> Detail | None:
    """Compare two rows, each in its own dtype and shape; None if their bytes, dtypes and shapes are equal."""
    candidate, parent = np.asarray(candidate), np.asarray(parent)  # a row of a scalar site is no array
    if candidate.dtype != parent.dtype:
        return Detail(class_=DTYPE)
    if candidate.shape != parent.shape:
        return Detail(class_=SHAPE)
    found = differing(candidate, parent)
    return None if found is None else summarize(found, candidate, parent)


def summarize(found: Elements, candidate: np.ndarray, parent: np.ndarray) -> Detail:
    """What the differing elements of two rows say about the rows."""
    gaps = distances(found)
    floats = is_float(candidate.dtype)
    return Detail(
        class_=CLASSES[int(found.ranks.max())],
        elements=candidate.size,
        elements_differ=len(found.where),
        first_element=[int(axis) for axis in np.unravel_index(found.where[0], candidate.shape)]
        if candidate.shape
        else [],
        max_ulp=greatest_ulp(found),
        max_abs=_largest(gaps.astype(np.float64)),
        max_rel=_largest(_over(gaps, wide(found.parent[found.finite]))),
        cosine=_cosine(wide(candidate.reshape(-1)), wide(parent.reshape(-1))) if floats else None,
        values=Both(candidate=_value(found.candidate[0]), parent=_value(found.parent[0])),
    )


def distances(found: Elements) -> np.ndarray:
    """Absolute differences of the finite elements: float64 [finite], exact uint64 for integers."""
    one, other = found.candidate[found.finite], found.parent[found.finite]
    if found.ulps is None:  # the difference of two integers always fits, whatever their width
        return np.maximum(one, other).astype(np.uint64) - np.minimum(one, other).astype(np.uint64)
    with np.errstate(all="ignore"):
        return np.abs(wide(one) - wide(other))


def greatest_ulp(found: Elements, among: np.ndarray | slice = slice(None)) -> int | None:
    """The greatest ULP distance of `among` the elements; None for integers, and where none is finite."""
    if found.ulps is None:
        return None
    ulps = found.ulps[among][found.finite[among]]
    return int(ulps.max()) if len(ulps) else None


def worst(details: list[Detail]) -> tuple[str | None, int | None]:
    """The worst class and the greatest ULP distance of some rows."""
    classes = [detail.class_ for detail in details if detail.class_ is not None]
    ulps = [detail.max_ulp for detail in details if detail.max_ulp is not None]
    return max(classes, key=CLASSES.index, default=None), max(ulps, default=None)


def logits(candidate: np.ndarray, parent: np.ndarray) -> Logits | None:
    """The two highest logits of both rows; None where a row is empty or holds NaN."""
    ours, theirs = top_two(candidate), top_two(parent)
    if ours is None or theirs is None:
        return None
    return Logits(candidate=ours, parent=theirs, argmax_flip=ours.top1 != theirs.top1)


def top_two(row: np.ndarray) -> TopTwo | None:
    """The two highest logits of a row, the lower token id first where they tie."""
    values = wide(row.reshape(-1))
    if not len(values) or np.isnan(values).any():
        return None
    first = int(values.argmax())
    high = float(values[first])
    if len(values) == 1:
        return TopTwo(top1=first, top1_value=high, top2=None, top2_value=None, margin=None, tie=False)
    rest = values.copy()
    rest[first] = -np.inf
    second = int(rest.argmax()) if np.isfinite(rest).any() else int(first == 0)
    low = float(values[second])
    return TopTwo(
        top1=first,
        top1_value=high,
        top2=second,
        top2_value=low,
        margin=0.0 if high == low else high - low,
        tie=high == low,
    )


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


def _over(gap: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """`gap` relative to `reference`, where that is not zero."""
    some = reference != 0
    with np.errstate(all="ignore"):
        return gap[some] / np.abs(reference[some])


def _largest(array: np.ndarray) -> float | None:
    value = float(array.max()) if len(array) else np.inf
    return value if np.isfinite(value) else None


def _cosine(one: np.ndarray, other: np.ndarray) -> float | None:
    with np.errstate(all="ignore"):
        one, other = _scaled(one), _scaled(other)
        scale = float(np.linalg.norm(one) * np.linalg.norm(other))
        cosine = float(one @ other) / scale if scale else np.nan
    return min(1.0, max(-1.0, cosine)) if np.isfinite(cosine) else None


def _scaled(row: np.ndarray) -> np.ndarray:
    """The row with 1 as its greatest magnitude, so that no square of it overflows or vanishes."""
    return row / np.abs(row).max() if len(row) else row


def _value(element: np.generic) -> Value:
    exact = int(element) if element.dtype.kind in "iub" else float(element)
    return Value(hex="0x" + element.tobytes()[::-1].hex(), decimal=repr(exact))
