"""How two rows of the same site differ: bytes first, then what the bytes mean in their dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localizer.diff.elements import (
    CLASSES,
    DTYPE,
    SHAPE,
    differing,
    distances,
    greatest_ulp,
    is_float,
    wide,
    worst_class,
)
from localizer.diff.heads import differing_heads
from localizer.diff.result import Both, Criterion, Head, Logits, TopTwo, Value
from localizer.diff.tolerance import within


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
        heads, heads_differ, heads_compared: see `localizer.diff.heads`; None for rows without heads.
        within_tolerance: None without a tolerance for the site, or without payload.
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
    heads: list[Head] | None = None
    heads_differ: int | None = None
    heads_compared: int | None = None
    within_tolerance: bool | None = None


def describe(candidate: np.ndarray, parent: np.ndarray, criteria: Sequence[Criterion] = ()) -> Detail | None:
    """Compare two rows, each in its own dtype and shape; None if their bytes, dtypes and shapes are equal.

    Args:
        candidate: a row.
        parent: its counterpart.
        criteria: those of the tolerances given for the site; empty where there is none.
    """
    candidate, parent = np.asarray(candidate), np.asarray(parent)  # a row of a scalar site is no array
    if candidate.dtype != parent.dtype:
        return unlike(DTYPE, criteria)
    if candidate.shape != parent.shape:
        return unlike(SHAPE, criteria)
    found = differing(candidate, parent)
    if found is None:
        return None
    gaps = distances(found)
    heads, heads_differ = differing_heads(found, candidate.shape)
    return Detail(
        class_=worst_class(found),
        elements=candidate.size,
        elements_differ=len(found.where),
        first_element=[int(axis) for axis in np.unravel_index(found.where[0], candidate.shape)]
        if candidate.shape
        else [],
        max_ulp=greatest_ulp(found),
        max_abs=_largest(gaps.astype(np.float64)),
        max_rel=_largest(_over(gaps, wide(found.parent[found.finite]))),
        cosine=_cosine(wide(candidate.reshape(-1)), wide(parent.reshape(-1)))
        if is_float(candidate.dtype)
        else None,
        values=Both(candidate=_value(found.candidate[0]), parent=_value(found.parent[0])),
        heads=heads,
        heads_differ=heads_differ,
        heads_compared=None if heads is None else candidate.shape[0],
        within_tolerance=within(found, candidate, parent, criteria),
    )


def unlike(kind: str, criteria: Sequence[Criterion]) -> Detail:
    """Rows of other dtype or shape, which no tolerance covers."""
    return Detail(class_=kind, within_tolerance=False if criteria else None)


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
        scale = length(one) * length(other)
        cosine = _dot(one, other) / scale if scale else np.nan
    return min(1.0, max(-1.0, cosine)) if np.isfinite(cosine) else None


def length(row: np.ndarray) -> float:
    """Euclidean length of a row of float64, of any shape."""
    return float(np.sqrt(_dot(row, row)))


def _dot(one: np.ndarray, other: np.ndarray) -> float:
    """The sum of products in numpy's own order: BLAS adds in one that depends on the processor."""
    return float(np.add.reduce((one * other).reshape(-1)))


def _scaled(row: np.ndarray) -> np.ndarray:
    """The row with 1 as its greatest magnitude, so that no square of it overflows or vanishes."""
    return row / np.abs(row).max() if len(row) else row


def _value(element: np.generic) -> Value:
    exact = int(element) if element.dtype.kind in "iub" else float(element)
    return Value(hex="0x" + element.tobytes()[::-1].hex(), decimal=repr(exact))
