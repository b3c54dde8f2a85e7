"""Why rows of a capture have no counterpart in the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from localizer.diff.drafts import FIRST_STEP, takes_hidden_states
from localizer.store.expected import is_draft
from localizer.store.reader import Capture
from localizer.store.schema import DRAFT_PADDING, FEEDS_LOGITS, KINDS


@dataclass(frozen=True)
class Unpaired:
    """Numbers of rows without a counterpart.

    Attributes:
        padding: of a draft, for rejected tokens.
        past: other rows that follow the first different token of their request.
        unknown: rows that are no padding and whose earlier tokens are unknown.
        others: by kind, rows that are neither padding nor past a difference.
    """

    padding: int
    past: int
    unknown: int
    others: dict[str, int]


def unpaired_rows(capture: Capture, rows: np.ndarray, first: Mapping[str, int | None]) -> Unpaired:
    """Sort the unpaired `rows`; `first` is the output index of each request's first different token."""
    kinds = capture.table.columns["kind"][rows]
    padding = kinds == DRAFT_PADDING
    past = ~padding & past_difference(capture, rows, first)
    unknown = ~padding & ~capture.table.prefix[rows].any(axis=1)
    codes, counts = np.unique(kinds[~padding & ~past], return_counts=True)
    others = {KINDS[code]: int(number) for code, number in zip(codes, counts, strict=True)}
    return Unpaired(int(padding.sum()), int(past.sum()), int(unknown.sum()), others)


def past_difference(capture: Capture, rows: np.ndarray, first: Mapping[str, int | None]) -> np.ndarray:
    """Bool [rows]: whether a row was computed from the first different token of its request, or a later one.

    A target's row is computed from the tokens up to its position; a draft's from those up to the base of its
    proposal, and from the token behind that where the draft is fed hidden states.
    """
    limits = np.full(len(capture.requests), np.iinfo(np.int64).max, np.int64)
    for number, name in enumerate(capture.requests):
        index = first.get(name)
        if index is not None:
            limits[number] = len(capture.prompts[name]) + index
    columns = capture.table.columns
    last = columns["position"][rows].astype(np.int64)
    draft = is_draft({"kind": columns["kind"][rows]})
    last[draft] = _bases(columns, rows[draft]) + takes_hidden_states(columns)
    return last >= limits[columns["request"][rows]]


def _bases(columns: Mapping[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """int64 [rows]: for each draft row the base position of its step's proposal; -1 if that is not known."""
    proposing = np.flatnonzero((columns["kind"] == FIRST_STEP) & (columns["logits"] >= FEEDS_LOGITS))
    keys, index = np.unique(_by_step(columns, proposing), return_index=True)
    keys = np.append(keys, np.iinfo(np.int64).max)
    positions = np.append(columns["position"][proposing[index]], -1)
    wanted = _by_step(columns, rows)
    at = np.searchsorted(keys, wanted)
    return np.where(keys[at] == wanted, positions[at], -1)


def _by_step(columns: Mapping[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """int64 [rows]: one number for step and request of each row."""
    return np.left_shift(columns["step"][rows].astype(np.int64), 32) + columns["request"][rows]
