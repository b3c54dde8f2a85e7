"""Payload of single pairs, read only where digests differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from localizer.diff import numerics
from localizer.diff.elements import DTYPE, SHAPE
from localizer.diff.numerics import Detail
from localizer.diff.result import Criterion, Logits, Tolerance
from localizer.diff.tolerance import criteria_of
from localizer.store.reader import Capture
from localizer.wire.spec import LOGITS


class Details:
    """Reads rows of two captures and says how they differ; every pair is read once."""

    def __init__(self, candidate: Capture, parent: Capture, tolerances: Sequence[Tolerance] = ()) -> None:
        self._captures = candidate, parent
        self._sites = tuple({site.name: site for site in capture.sites} for capture in self._captures)
        self._tolerances = tolerances
        self._known: dict[tuple[str, int, int], Detail] = {}

    def stored(self, site: str) -> bool:
        """Whether both sides kept rows of a site."""
        return all(site in capture.payload for capture in self._captures)

    def criteria(self, site: str) -> list[Criterion]:
        """What the tolerances given ask of a site; empty where none is given for it."""
        return criteria_of(site, self._tolerances)

    def rows(self, site: str, row: int, other: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The rows of both sides; None where one was not kept."""
        if not self.stored(site):
            return None
        ours = self._captures[0].row_payload(site, row)
        theirs = self._captures[1].row_payload(site, other)
        return None if ours is None or theirs is None else (ours, theirs)

    def of(self, site: str, row: int, other: int) -> Detail:
        """How row `row` of the candidate and row `other` of the parent differ at a site.

        Raises:
            DamagedCapture: a stored row does not have its digest.
        """
        key = site, row, other
        if key not in self._known:
            self._known[key] = self._describe(*key)
        return self._known[key]

    def _describe(self, site: str, row: int, other: int) -> Detail:
        ours, theirs = (sites[site] for sites in self._sites)
        if ours.dtype != theirs.dtype:
            return numerics.unlike(DTYPE, self.criteria(site))
        if ours.shape != theirs.shape:
            return numerics.unlike(SHAPE, self.criteria(site))
        both = self.rows(site, row, other)
        if both is None:
            return Detail(elements=None if ours.shape is None else math.prod(ours.shape))
        detail = numerics.describe(*both, self.criteria(site))
        assert detail is not None, "both rows have their digests, which differ"
        return detail

    def logits(self, row: int, other: int, site: str = LOGITS) -> Logits | None:
        """The two highest logits of both rows; None where they were not kept."""
        both = self.rows(site, row, other)
        return None if both is None else numerics.logits(*both)
