"""The causal order of differing pairs: step, draft step, request, position; on a row the order of sites."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localizer.diff.align import Alignment
from localizer.diff.compare import Bits
from localizer.diff.drafts import draft_steps
from localizer.store.reader import Capture


@dataclass(frozen=True)
class CausalOrder:
    """Pairs with a difference, the causally first first.

    Attributes:
        pairs: int64 [n], indices into the alignment.
        site: int64 [n], for each the first differing site, an index into the shared sites.
        request: int32 [n], for each the index of the candidate's request.
    """

    pairs: np.ndarray
    site: np.ndarray
    request: np.ndarray


def causal_order(candidate: Capture, alignment: Alignment, differ: Bits) -> CausalOrder:
    """Sort the differing pairs by the candidate's (step, draft step, request, position)."""
    pairs = np.flatnonzero(differ.any())
    order = causal_sort(candidate, alignment.candidate[pairs])
    rows, pairs, columns = alignment.candidate[pairs], pairs[order], candidate.table.columns
    first_site = differ.first(pairs)
    return CausalOrder(pairs, first_site, columns["request"][rows[order]])


def causal_sort(capture: Capture, rows: np.ndarray) -> np.ndarray:
    """Indices that sort rows by step, draft step (the target first), request and position."""
    columns = {name: capture.table.columns[name][rows] for name in ("position", "request", "step", "kind")}
    keys = columns["position"], columns["request"], draft_steps(columns["kind"]), columns["step"]
    return np.lexsort(keys)
