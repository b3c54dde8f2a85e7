"""The built-in model: a tiny Llama with random weights drawn from a seed, and an EAGLE3 draft for it.

Eight layers and 8 MB; needs no download and no torch. Row i of the head resembles the embedding of token
i - 1: the draft, which knows that, is accepted in part.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from localizer.workload.draw import Generator, Weights, bf16, matrix, write

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 256, 512, 8, 4, 2, 64, 1024

CONFIG: dict[str, Any] = {
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

DRAFT_CONFIG = CONFIG | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": VOCABULARY,
}


def write_tiny(folder: Path) -> None:
    """Write the model into an empty folder; the same bytes every time."""
    write(folder, CONFIG, Draws().target())


def write_tiny_draft(folder: Path) -> None:
    """Write the EAGLE3 draft of the model into an empty folder; the same bytes every time."""
    write(folder, DRAFT_CONFIG, Draws().draft())


class Draws:
    """The parameters in bfloat16, drawn in a fixed order: the target's, then the draft's."""

    def __init__(self) -> None:
        self._generator = Generator()
        embedding = self._generator.normal(VOCABULARY, HIDDEN)
        self._target = {"model.embed_tokens.weight": bf16(embedding), "model.norm.weight": _ones(HIDDEN)}
        for layer in range(LAYERS):
            self._target |= self._layer(f"model.layers.{layer}.", HIDDEN, 1.0)
        self._target["lm_head.weight"] = self._generator.head(embedding)
        self._draft = self._draft_layer() | {
            "fc.weight": self._matrix(HIDDEN, 3 * HIDDEN, 0.3),
            "norm.weight": _ones(HIDDEN),
            "lm_head.weight": bf16(np.roll(embedding, 1, axis=0) / math.sqrt(HIDDEN)),
        }

    def target(self) -> Weights:
        """Named as in transformers' LlamaForCausalLM."""
        return self._target

    def draft(self) -> Weights:
        """Named as vLLM's LlamaForCausalLMEagle3 loads them."""
        return self._draft

    def _draft_layer(self) -> Weights:
        """A layer that attends to its own position and adds half of the token's embedding to what it got."""
        half = self._generator.some(KV_HEADS * HEAD_DIM, HIDDEN)
        part = np.eye(HIDDEN, dtype=np.float32)[half]
        heads = part.reshape(KV_HEADS, HEAD_DIM, HIDDEN)
        queries = np.repeat(heads, HEADS // KV_HEADS, axis=0).reshape(HEADS * HEAD_DIM, HIDDEN)
        nothing = np.zeros_like(queries)
        return self._layer("midlayer.", 2 * HIDDEN, 0.05) | {
            "midlayer.hidden_norm.weight": _ones(HIDDEN),
            "midlayer.self_attn.q_proj.weight": bf16(np.hstack([queries, nothing])),
            "midlayer.self_attn.k_proj.weight": bf16(np.hstack([part, nothing[: len(part)]])),
            "midlayer.self_attn.v_proj.weight": bf16(np.hstack([part, nothing[: len(part)]])),
            "midlayer.self_attn.o_proj.weight": bf16(queries.T / (HEADS // KV_HEADS)),
        }

    def _matrix(self, rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return self._generator.draw(matrix(rows, columns, scale))

    def _layer(self, prefix: str, inputs: int, output_scale: float) -> Weights:
        """One decoder layer whose attention reads `inputs` features; `output_scale` is of what it adds."""
        return {
            f"{prefix}input_layernorm.weight": _ones(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": _ones(HIDDEN),
            f"{prefix}self_attn.q_proj.weight": self._matrix(HEADS * HEAD_DIM, inputs, 2.0),
            f"{prefix}self_attn.k_proj.weight": self._matrix(KV_HEADS * HEAD_DIM, inputs, 2.0),
            f"{prefix}self_attn.v_proj.weight": self._matrix(KV_HEADS * HEAD_DIM, inputs),
            f"{prefix}self_attn.o_proj.weight": self._matrix(HIDDEN, HEADS * HEAD_DIM, output_scale),
            f"{prefix}mlp.gate_proj.weight": self._matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": self._matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": self._matrix(HIDDEN, INTERMEDIATE, output_scale),
        }


def _ones(size: int) -> np.ndarray:
    return np.ones(size, ml_dtypes.bfloat16)
