"""Row counts are read from every form of attention metadata.

Dual-batch overlap needs several GPUs and cannot run here. What micro-batches look like was recorded from the
functions with which vLLM 0.32.0 cuts a batch in two (`maybe_create_ubatch_slices`, `split_attn_metadata`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from localizer.hooks.metadata import row_counts  # noqa: E402 - needs torch

LAYER = "model.layers.8.self_attn.attn"

RECORDED: list[tuple[list[int], list[tuple[slice, slice, list[int]]]]] = [
    ([5, 3], [(slice(0, 1), slice(0, 4), [0, 4]), (slice(0, 2), slice(4, 8), [0, 1, 4])]),
    ([1, 1, 1, 1], [(slice(0, 2), slice(0, 2), [0, 1, 2]), (slice(2, 4), slice(2, 4), [0, 1, 2])]),
    ([2, 7, 1], [(slice(0, 2), slice(0, 5), [0, 2, 5]), (slice(1, 3), slice(5, 10), [0, 4, 5])]),
    ([16], [(slice(0, 1), slice(0, 8), [0, 8]), (slice(0, 1), slice(8, 16), [0, 8])]),
    ([3, 3, 2], [(slice(0, 2), slice(0, 4), [0, 3, 4]), (slice(1, 3), slice(4, 8), [0, 2, 4])]),
]
"""Rows of each request; for each micro-batch its requests, its rows, and its `query_start_loc`."""


def metadata(starts: Sequence[int]) -> SimpleNamespace:
    return SimpleNamespace(query_start_loc=torch.tensor(starts, dtype=torch.int32))


def context(attn_metadata: Any, slices: Any = None) -> SimpleNamespace:
    return SimpleNamespace(attn_metadata=attn_metadata, ubatch_slices=slices)


def recorded(batches: list[tuple[slice, slice, list[int]]]) -> SimpleNamespace:
    slices = [SimpleNamespace(request_slice=who, token_slice=rows) for who, rows, _ in batches]
    return context([{"another": None, LAYER: metadata(starts)} for _, _, starts in batches], slices)


@pytest.mark.parametrize("form", ["by layer", "one object"])
def test_one_batch(form: str) -> None:
    whole = metadata([0, 5, 6, 9])
    assert row_counts(context({LAYER: whole} if form == "by layer" else whole), LAYER) == [5, 1, 3]


@pytest.mark.parametrize(("counts", "batches"), RECORDED)
def test_micro_batches(counts: list[int], batches: list[tuple[slice, slice, list[int]]]) -> None:
    assert row_counts(recorded(batches), LAYER) == counts


@pytest.mark.parametrize("unknown", [None, {}, {LAYER: None}, SimpleNamespace(), {LAYER: SimpleNamespace()}])
def test_metadata_that_does_not_tell(unknown: Any) -> None:
    with pytest.raises(RuntimeError, match=f"the metadata of {LAYER} does not tell the rows"):
        row_counts(context(unknown), LAYER)


def test_micro_batches_whose_slices_are_not_known() -> None:
    batches = recorded(RECORDED[0][1])
    for slices in (None, batches.ubatch_slices[:1]):
        with pytest.raises(RuntimeError, match="in micro-batches whose slices are not known"):
            row_counts(context(batches.attn_metadata, slices), LAYER)
    with pytest.raises(RuntimeError, match="whose slices are not known"):
        row_counts(SimpleNamespace(attn_metadata=batches.attn_metadata), LAYER)


def test_a_micro_batch_that_does_not_start_where_the_one_before_ended() -> None:
    first, second = RECORDED[0][1]
    with pytest.raises(RuntimeError, match="a micro-batch starts at row 4 instead of 0"):
        row_counts(recorded([second, first]), LAYER)
