"""Which rows of a table a site exists on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from localizer.store.schema import DECIDES_TOKEN, DRAFT_PADDING, FEEDS_LOGITS
from localizer.wire.spec import ALL_ROWS, DRAFT_LOGIT_ROWS, DRAFT_ROWS, LOGIT_ROWS, TOKEN_ROWS

_LEAST = {
    ALL_ROWS: (False, 0),
    LOGIT_ROWS: (False, FEEDS_LOGITS),
    TOKEN_ROWS: (False, DECIDES_TOKEN),
    DRAFT_ROWS: (True, 0),
    DRAFT_LOGIT_ROWS: (True, FEEDS_LOGITS),
}
"""For each kind of site: whether its rows are a draft's, and the least value of their column `logits`."""


def is_draft(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Bool [rows]: whether a row is a draft's."""
    return columns["kind"] >= DRAFT_PADDING


def applicable(columns: Mapping[str, np.ndarray], which: str) -> np.ndarray:
    """Bool [rows]: where a site of `which` rows exists; on other rows it is not applicable."""
    draft, least = _LEAST[which]
    return (is_draft(columns) == draft) & (columns["logits"] >= least)
