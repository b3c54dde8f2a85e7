"""The built-in model: an 8-layer Llama of 8 MB, its weights drawn from a seed; no download, no torch."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 256, 512, 8, 4, 2, 64, 1024
SEED = 20260101

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}


def build_tiny(folder: Path) -> None:
    """Write config.json and model.safetensors into `folder` unless they are there; always the same bytes."""
    if _is_built(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        save_file(weights(), made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(CONFIG, indent=1))
        if not _is_built(folder):  # another process may have been faster, and its source may be reading
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)


def _is_built(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def weights() -> dict[str, np.ndarray]:
    """The model's parameters in bfloat16, named as in transformers' LlamaForCausalLM."""
    generator = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int) -> np.ndarray:
        drawn = generator.standard_normal((rows, columns), dtype=np.float32) / math.sqrt(columns)
        return drawn.astype(ml_dtypes.bfloat16)

    ones = np.ones(HIDDEN, ml_dtypes.bfloat16)
    table = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        table |= {
            f"{prefix}input_layernorm.weight": ones,
            f"{prefix}post_attention_layernorm.weight": ones,
            f"{prefix}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return table
