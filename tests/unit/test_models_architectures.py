"""The tiny models of other architectures: the same bytes every time, and what their classes load."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from localizer.workload.architectures import (
    ARCHITECTURES,
    EXPERTS,
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    weights,
    write_architecture,
)
from localizer.workload.models import BUILT_IN, digests

DIGESTS = {
    "tiny-qwen3": ("646801d89f4e20e150a8e0594f4bef39", "a282a2ad944a7edd104398cdde72a2d7"),
    "tiny-gemma3": ("5fdb2b53f1e2656806166b384558aae2", "e7e69e43fcd211653e2453e036991d90"),
    "tiny-qwen3-moe": ("dba8332268784b34799c1e00ca2c44c8", "aee388e8be1a59ab5ba186477d297e8d"),
    "tiny-mamba2": ("1acd0d3429e9de1b507b522507143d92", "5751fc946f2727b2d832f1e38f82c84c"),
    "tiny-deepseek": ("ae02607ea33b34348ce588e71a479823", "bf944c941cb9ae12cde8250fc89b3850"),
}
"""xxh3-128 of config.json and model.safetensors."""

SHAPES = {
    "tiny-qwen3": {
        "model.layers.0.self_attn.q_norm.weight": (HEAD_DIM,),
        "model.layers.3.mlp.gate_proj.weight": (256, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    },
    "tiny-gemma3": {
        "model.layers.0.pre_feedforward_layernorm.weight": (HIDDEN,),
        "model.layers.3.post_feedforward_layernorm.weight": (HIDDEN,),
        "model.layers.3.self_attn.k_norm.weight": (HEAD_DIM,),
    },
    "tiny-qwen3-moe": {
        "model.layers.0.mlp.gate.weight": (EXPERTS, HIDDEN),
        f"model.layers.3.mlp.experts.{EXPERTS - 1}.down_proj.weight": (HIDDEN, 64),
    },
    "tiny-mamba2": {
        "backbone.embeddings.weight": (VOCABULARY, HIDDEN),
        "backbone.layers.0.mixer.conv1d.weight": (320, 1, 4),
        "backbone.layers.3.mixer.A_log": (4,),
        "backbone.norm_f.weight": (HIDDEN,),
    },
    "tiny-deepseek": {
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (512 + 64, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (256, HIDDEN),
        "model.layers.1.mlp.gate.e_score_correction_bias": (EXPERTS,),
        "model.layers.3.mlp.shared_experts.down_proj.weight": (HIDDEN, 64),
    },
}
"""Some parameters of each, the characteristic ones."""

COUNTS = {
    "tiny-qwen3": LAYERS * 11,
    "tiny-gemma3": LAYERS * 13,
    "tiny-qwen3-moe": LAYERS * (9 + 3 * EXPERTS),
    "tiny-mamba2": LAYERS * 9,
    "tiny-deepseek": LAYERS * 9 + 3 + (LAYERS - 1) * (2 + 3 * EXPERTS + 3),
}
"""Parameters inside the layers."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_is_always_the_same(name: str, tmp_path: Path) -> None:
    BUILT_IN[name].write(tmp_path)
    assert tuple(digests(tmp_path).values()) == DIGESTS[name]
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size == pytest.approx(BUILT_IN[name].size, abs=1000)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_has_the_parameters_of_its_class(name: str) -> None:
    found = weights(name)
    assert {array.dtype for array in found.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert len(found) == COUNTS[name] + 3  # embedding, last norm, head
    for parameter, shape in SHAPES[name].items():
        assert found[parameter].shape == shape, parameter
    assert found["lm_head.weight"].shape == (VOCABULARY, HIDDEN)
    assert all(np.isfinite(array.astype(np.float32)).all() for array in found.values())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_configuration_says_what_was_drawn(name: str, tmp_path: Path) -> None:
    write_architecture(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (LAYERS, HIDDEN)
    assert config["vocab_size"] == VOCABULARY
    assert config["tie_word_embeddings"] is False


def test_models_differ_from_each_other() -> None:
    embeddings = {weights(name)[ARCHITECTURES[name].names.embedding].tobytes() for name in ARCHITECTURES}
    assert len(embeddings) == len(ARCHITECTURES)
