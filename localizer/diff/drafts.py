"""The draft of speculative decoding: the order of its rows, and what was fed to one of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from localizer.diff.align import Alignment
from localizer.diff.compare import same_layout
from localizer.diff.places import INPUTS, INSIDE, place
from localizer.diff.result import FedBy
from localizer.store.expected import is_draft
from localizer.store.reader import Capture, Table
from localizer.store.schema import DRAFT_PADDING, FEEDS_LOGITS
from localizer.wire.spec import HIDDEN

FIRST_STEP = DRAFT_PADDING + 1
"""The kind of rows of draft step 1."""


def draft_steps(kinds: np.ndarray) -> np.ndarray:
    """int64 [rows]: the draft step, from 1, of rows of these kinds; 0 for the target's rows and padding."""
    return np.maximum(kinds.astype(np.int64) - DRAFT_PADDING, 0)


def takes_hidden_states(columns: Mapping[str, np.ndarray]) -> bool:
    """Whether the draft is fed the target's hidden states, as EAGLE and MTP are; a draft model is not.

    Such a draft's first step has the target's rows; that of a draft model has more.
    """
    drafted = np.flatnonzero(is_draft(columns))
    if not len(drafted):
        return False
    step, request = (columns[name][drafted[0]] for name in ("step", "request"))
    kinds = columns["kind"][(columns["step"] == step) & (columns["request"] == request)]
    return bool((kinds < DRAFT_PADDING).sum() == np.isin(kinds, (DRAFT_PADDING, FIRST_STEP)).sum())


class Feeding:
    """Finds the row whose hidden states were fed to a draft's row, and whether both sides had them equal."""

    def __init__(self, candidate: Capture, parent: Capture, alignment: Alignment) -> None:
        self._tables = candidate.table, parent.table
        self._columns = alignment.candidate_sites, alignment.parent_sites
        self._names = alignment.sites
        self._layout = same_layout(candidate, parent, alignment)
        self._fed = all(takes_hidden_states(table.columns) for table in self._tables)
        places = [place(name) for name in alignment.sites]
        inside = [i for i, where in enumerate(places) if where.stage == INSIDE]
        lacking = any(
            place(name).stage == INSIDE and not place(name).suffix
            for name in (*alignment.candidate_only, *alignment.parent_only, *alignment.other_digest)
        )
        final = [i for i, where in enumerate(places) if where.name == HIDDEN]
        self._target = inside or ([] if lacking else final)  # EAGLE3 takes the one, EAGLE the other
        self._draft = [i for i, where in enumerate(places) if where.draft and where.stage != INPUTS]

    def of(self, row: int, other: int) -> FedBy | None:
        """What was fed to row `row` of the candidate, which pairs with row `other` of the parent.

        None where the draft takes in no hidden states, or the row that fed it is not there.
        """
        feeders = [_feeder(table, at) for table, at in zip(self._tables, (row, other), strict=True)]
        if not self._fed or feeders[0] is None or feeders[1] is None:
            return None
        step = int(draft_steps(self._tables[0].columns["kind"][row])) - 1
        sites = self._draft if step else self._target
        compared, equal = np.ones(len(sites), np.bool_), self._layout[sites]
        one, theirs = (
            table.digest[feeder, columns[sites]]
            for table, feeder, columns in zip(self._tables, feeders, self._columns, strict=True)
        )
        for table, feeder, columns in zip(self._tables, feeders, self._columns, strict=True):
            compared &= table.present[feeder, columns[sites]]
        equal = equal & compared & (one == theirs).all(axis=-1)
        return FedBy(
            draft_step=step,
            position=int(self._tables[0].columns["position"][feeders[0]]),
            sites=[self._names[index] for index in sites],
            equal=int(equal.sum()),
            differ=int((compared & ~equal).sum()),
            not_compared=int((~compared).sum()),
        )


def _feeder(table: Table, row: int) -> int | None:
    """The row that fed a draft's row: the target's at its position, or the draft's that proposed it."""
    columns = table.columns
    here = (columns["step"] == columns["step"][row]) & (columns["request"] == columns["request"][row])
    if columns["kind"][row] == FIRST_STEP:
        here &= ~is_draft(columns) & (columns["position"] == columns["position"][row])
    else:
        here &= (columns["kind"] == columns["kind"][row] - 1) & (columns["logits"] >= FEEDS_LOGITS)
    found = np.flatnonzero(here)
    return int(found[0]) if len(found) else None
