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


def describe(candidate: np.ndarray, parent: np.ndarray) -> Detail | None:
    """Compare two rows, each in its own dtype and shape; None if their bytes, dtypes and shapes are equal."""
    candidate, parent = np.asarray(candidate), np.asarray(parent)  # a row of a scalar site is no array
    if candidate.dtype != parent.dtype:
        return Detail(class_=DTYPE)
    if candidate.shape != parent.shape:
        return Detail(class_=SHAPE)
    ours, theirs = _bits(candidate), _bits(parent)
    where = np.flatnonzero(ours != theirs)
    if not len(where):
        return None
    one, other = candidate.reshape(-1)[where], parent.reshape(-1)[where]
    first = int(where[0])
    index = [int(axis) for axis in np.unravel_index(first, candidate.shape)] if candidate.shape else []
    values = Both(candidate=_value(one[0]), parent=_value(other[0]))
    kind, ulp, absolute, relative, cosine = VALUE, None, None, None, None
    if _is_float(candidate.dtype):
        ranks, ulps, finite = _rank(one, other, ours[where], theirs[where])
        kind = CLASSES[int(ranks.max())]
        ulp = int(ulps[finite].max()) if finite.any() else None
        absolute, relative = _distances(_wide(one[finite]), _wide(other[finite]))
        cosine = _cosine(_wide(candidate.reshape(-1)), _wide(parent.reshape(-1)))
    else:
        high, low = np.maximum(one, other), np.minimum(one, other)
        gap = (high.astype(np.uint64) - low.astype(np.uint64)).astype(np.float64)
        absolute, relative = _largest(gap), _largest(_over(gap, other.astype(np.float64)))
    return Detail(kind, candidate.size, len(where), index, ulp, absolute, relative, cosine, values)


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
    wide = _wide(row.reshape(-1))
    if not len(wide) or np.isnan(wide).any():
        return None
    first = int(wide.argmax())
    high = float(wide[first])
    if len(wide) == 1:
        return TopTwo(top1=first, top1_value=high, top2=None, top2_value=None, margin=None, tie=False)
    rest = wide.copy()
    rest[first] = -np.inf
    second = int(rest.argmax()) if np.isfinite(rest).any() else int(first == 0)
    low = float(wide[second])
    return TopTwo(
        top1=first,
        top1_value=high,
        top2=second,
        top2_value=low,
        margin=0.0 if high == low else high - low,
        tie=high == low,
    )


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind not in "iub"  # ml_dtypes' types are of kind V or f


def _bits(array: np.ndarray) -> np.ndarray:
    """The elements' bytes as flat unsigned integers."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.dtype(f"u{flat.dtype.itemsize}"))


def _wide(array: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.astype(np.float64)


def _rank(
    one: np.ndarray, other: np.ndarray, bits: np.ndarray, other_bits: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(index in `CLASSES`, ULP distance, both finite) of elements whose bytes differ, each [elements]."""
    left, right = _wide(one), _wide(other)
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


def _distances(one: np.ndarray, other: np.ndarray) -> tuple[float | None, float | None]:
    with np.errstate(all="ignore"):
        gap = np.abs(one - other)
    return _largest(gap), _largest(_over(gap, other))


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
        scale = float(np.linalg.norm(one) * np.linalg.norm(other))
        cosine = float(one @ other) / scale if scale else np.nan
    return min(1.0, max(-1.0, cosine)) if np.isfinite(cosine) else None


def _value(element: np.generic) -> Value:
    exact = int(element) if element.dtype.kind in "iub" else float(element)
    return Value(hex="0x" + element.tobytes()[::-1].hex(), decimal=repr(exact))
