"""What taps inside full graphs will need is known before an engine starts, or said to be unknown."""

from __future__ import annotations

from typing import Any

import pytest

from localizer.capture.graphtaps import MOST_ROWS, estimate, greatest_graph
from localizer.store.schema import GraphTaps

LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
ROW = (4096 + 1024 + 1024 + 4096) * 2
"""Bytes of a row at the four sites of one layer."""


def of(config: dict[str, Any] = LLAMA, **changes: Any) -> GraphTaps | None:
    asked: dict[str, Any] = {"layers": "all", "sites": (), "rows": None} | changes
    return estimate(config, asked.pop("draft", None), asked.pop("engine", {}), **asked)


def taps(rows: int, size: int) -> GraphTaps:
    return GraphTaps(rows=rows, bytes=size)


def test_all_layers_of_an_8b_model() -> None:
    assert of() == taps(512, 512 * 32 * ROW)


@pytest.mark.parametrize(
    ("changes", "rows", "size"),
    [
        ({"layers": "first"}, 512, ROW),
        ({"layers": "0,30-31"}, 512, 3 * ROW),
        ({"layers": "0-99"}, 512, 32 * ROW),
        ({"sites": ("*/query", "*.3.*/output")}, 512, 33 * 4096 * 2),
        ({"rows": 64}, 64, 32 * ROW),
        ({"rows": 4096}, 512, 32 * ROW),
        ({"engine": {"dtype": "float32"}}, 512, 64 * ROW),
        ({"engine": {"cudagraph_capture_sizes": [1, 8, 4]}}, 8, 32 * ROW),
        ({"engine": {"compilation_config": {"cudagraph_capture_sizes": [16]}}}, 16, 32 * ROW),
        ({"engine": {"compilation_config": {"max_cudagraph_capture_size": 32}}}, 32, 32 * ROW),
        ({"engine": {"tensor_parallel_size": 4}}, 512, 8 * ROW),
        ({"engine": {"tensor_parallel_size": 16}}, 512, 32 * (2 + 1 + 1 + 2) * 128 * 2),
        ({"config": LLAMA | {"head_dim": 64}}, 512, 16 * ROW),
        ({"config": {"text_config": LLAMA}}, 512, 32 * ROW),
        ({"config": LLAMA | {"layer_types": ["full_attention", "sliding_attention"]}}, 512, 32 * ROW),
    ],
)
def test_what_it_depends_on(changes: dict[str, Any], rows: int, size: int) -> None:
    assert of(**changes) == taps(rows, rows * size)


def test_a_draft_needs_its_layer_for_each_row_and_its_ends_for_each_request() -> None:
    draft = LLAMA | {"num_hidden_layers": 1, "draft_vocab_size": 1000, "vocab_size": 9}
    found = of(draft=draft, engine={"max_num_seqs": 8}, rows=64)
    assert found == taps(64, 64 * 33 * ROW + 8 * 2 * (4096 + 1000))


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"enforce_eager": True}},
        {"engine": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}},
        {"engine": {"compilation_config": {"cudagraph_mode": "none"}}},
        {"engine": {"cudagraph_capture_sizes": []}},
        {"sites": ("lm_head/logits",)},
        {"config": {}},
        {"config": LLAMA | {"kv_lora_rank": 512}},
        {"config": LLAMA | {"layer_types": ["linear_attention", "mamba"]}},
        {"config": LLAMA | {"num_hidden_layers": "32"}},
        {"draft": {"model_type": "medusa"}},
    ],
)
def test_where_there_are_none_or_nobody_knows(changes: dict[str, Any]) -> None:
    assert of(**changes) is None


def test_odd_arguments_are_no_reason_to_fail() -> None:
    for engine in (
        {"compilation_config": "3"},
        {"compilation_config": 3},
        {"cudagraph_capture_sizes": "1,2"},
    ):
        assert greatest_graph(engine) == MOST_ROWS
    assert greatest_graph({"cudagraph_capture_sizes": [True, "x", 4]}) == 4
