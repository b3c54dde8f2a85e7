"""Tolerances that a person gives: they mark what differs by little, and hide nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from localizer.diff.elements import Elements, distances, is_float, wide
from localizer.diff.result import Criterion, Tolerance
from localizer.wire import ranks

ULP, ABS, REL = KINDS = ("ulp", "abs", "rel")
"""Units in the last place; absolute; relative to the parent."""

FORM = "write SITE=ulp:1, SITE=abs:1e-3, SITE=rel:1e-2, or several joined by |"

_MOST_ULP = 1 << 63


def parse(text: str) -> Tolerance:
    """A tolerance from `SITE=ulp:1|abs:1e-3`; SITE is a shell pattern.

    Raises:
        ValueError: it is malformed; the message says what is wrong, without a full stop.
    """
    site, equals, criteria = text.rpartition("=")
    if not equals or not site:
        raise ValueError(f"names no site: {FORM}")
    return Tolerance(site=site, criteria=[_criterion(part) for part in criteria.split("|")])


def _criterion(text: str) -> Criterion:
    kind, _, number = text.strip().partition(":")
    if kind not in KINDS:
        raise ValueError(f"{text!r} is no criterion: {FORM}")
    try:
        limit = float(number)
    except ValueError:
        raise ValueError(f"{number!r} in {text!r} is no number: {FORM}") from None
    if not math.isfinite(limit) or limit < 0:
        raise ValueError(f"{number!r} in {text!r} is no limit: give a finite number that is not negative")
    if kind == ULP and (limit != int(limit) or limit > _MOST_ULP):
        raise ValueError(f"{number!r} in {text!r} counts no units in the last place: give a whole number")
    return Criterion(kind=kind, limit=limit)


def criteria_of(site: str, tolerances: Sequence[Tolerance]) -> list[Criterion]:
    """The criteria of every tolerance given for a site; empty where there is none."""
    return [
        criterion
        for tolerance in tolerances
        if ranks.matches(site, tolerance.site)
        for criterion in tolerance.criteria
    ]


def within(
    found: Elements, candidate: np.ndarray, parent: np.ndarray, criteria: Sequence[Criterion]
) -> bool | None:
    """Whether each differing element of two rows meets one of the criteria; None without any.

    A row that holds a NaN on either side never passes, whatever its bytes, nor does an element that is finite
    on one side alone, or infinite on both with other signs.
    """
    if not criteria:
        return None
    if is_float(candidate.dtype) and any(np.isnan(wide(row)).any() for row in (candidate, parent)):
        return False
    if not found.finite.all():
        return False
    passes = np.zeros(len(found.where), np.bool_)
    for criterion in criteria:
        passes |= _meets(found, criterion)
    return bool(passes.all())


def _meets(found: Elements, criterion: Criterion) -> np.ndarray:
    """Bool [n]: which of the elements, all finite, meet a criterion; no integers meet one in ULP."""
    if criterion.kind == ULP:
        none = np.zeros(len(found.where), np.bool_)
        return none if found.ulps is None else found.ulps <= np.uint64(criterion.limit)
    gaps = distances(found)
    if criterion.kind == REL:
        with np.errstate(over="ignore"):
            return gaps <= criterion.limit * np.abs(wide(found.parent))
    if found.ulps is None:  # exactly, however great
        return gaps <= np.uint64(min(math.floor(criterion.limit), 2**64 - 1))
    return gaps <= criterion.limit
