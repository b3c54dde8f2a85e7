"""Tiny models of other architectures than Llama, with random weights drawn from a seed.

Four layers and a few MB each; they need no download and no torch. An architecture is a configuration and what
the parameters of a layer are drawn from; embedding, head and the last norm are drawn alike for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localizer.workload.draw import SEED, Generator, Parameter, Weights, bf16, matrix, write

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 4, 128, 256, 1024
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
EXPERTS, EXPERTS_A_TOKEN, EXPERT_INTERMEDIATE = 8, 2, 64
STATE, CONVOLUTION = 32, 4
"""Of Mamba 2: size of the state of a head, and how many positions the convolution reaches."""

Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 96, 512, 64, 64, 64
"""Of DeepSeek's latent attention: ranks, and sizes of a head; vLLM's CPU kernel knows only 512 + 64."""

Parameters = dict[str, Parameter]


@dataclass(frozen=True)
class Names:
    """How a model's parameters are named outside its layers, which are `layers`.0, 1, ..."""

    embedding: str = "model.embed_tokens.weight"
    layers: str = "model.layers"
    norm: str = "model.norm.weight"


@dataclass(frozen=True)
class Architecture:
    """A model to be drawn.

    Attributes:
        what: a few words.
        size: bytes of its folder.
        config: config.json, but for what all have in common.
        layer: what the parameters of layer i are drawn from, by their names within the layer.
        norm: what the weights of a norm of that size are drawn from.
        names: of the parameters outside its layers.
        embedding_scale: what the model multiplies its embeddings by.
    """

    what: str
    size: int
    config: dict[str, Any]
    layer: Callable[[int], Parameters]
    norm: Callable[[int], Parameter]
    names: Names = Names()
    embedding_scale: float = 1.0


def write_architecture(name: str, folder: Path) -> None:
    """Write a model of `ARCHITECTURES` into an empty folder; the same bytes every time."""
    write(folder, COMMON | ARCHITECTURES[name].config, weights(name))


def weights(name: str) -> Weights:
    """The parameters in bfloat16, named as in transformers' class of that architecture."""
    architecture, generator = ARCHITECTURES[name], Generator([SEED, *name.encode()])
    names = architecture.names
    embedding = generator.normal(VOCABULARY, HIDDEN)
    found = {names.embedding: bf16(embedding / architecture.embedding_scale)}
    for index in range(LAYERS):
        for part, parameter in architecture.layer(index).items():
            found[f"{names.layers}.{index}.{part}"] = generator.draw(parameter)
    found[names.norm] = generator.draw(architecture.norm(HIDDEN))
    found["lm_head.weight"] = generator.head(embedding)
    return found


# -- what layers consist of --------------------------------------------------------------------------------


def norm(size: int) -> Parameter:
    """The weights of an RMS norm."""
    return Parameter((size,), 1.0, 0.1)


def offset_norm(size: int) -> Parameter:
    """The weights of an RMS norm that adds one to them."""
    return Parameter((size,), 0.0, 0.1)


def mlp(prefix: str, intermediate: int) -> Parameters:
    """A gated MLP."""
    return {
        f"{prefix}.gate_proj.weight": matrix(intermediate, HIDDEN),
        f"{prefix}.up_proj.weight": matrix(intermediate, HIDDEN),
        f"{prefix}.down_proj.weight": matrix(HIDDEN, intermediate, 2.0),
    }


def experts() -> Parameters:
    """A router and its experts."""
    found = {"mlp.gate.weight": matrix(EXPERTS, HIDDEN, 2.0)}
    for expert in range(EXPERTS):
        found |= mlp(f"mlp.experts.{expert}", EXPERT_INTERMEDIATE)
    return found


def attention(head_norm: Callable[[int], Parameter]) -> Parameters:
    """Grouped-query attention with norms of query and key."""
    return {
        "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": head_norm(HEAD_DIM),
        "self_attn.k_norm.weight": head_norm(HEAD_DIM),
    }


def norms(*names: str, of: Callable[[int], Parameter] = norm) -> Parameters:
    """Norms of the residual stream, or of what is added to it."""
    return {f"{name}.weight": of(HIDDEN) for name in names}


AROUND = ("input_layernorm", "post_attention_layernorm")
"""Norms before attention and MLP, as Llama names them."""


def qwen3(index: int) -> Parameters:
    """A layer of Qwen 3."""
    return norms(*AROUND) | attention(norm) | mlp("mlp", INTERMEDIATE)


def qwen3_moe(index: int) -> Parameters:
    """A layer of Qwen 3 with experts."""
    return norms(*AROUND) | attention(norm) | experts()


def gemma3(index: int) -> Parameters:
    """A layer of Gemma 3: norms before and after attention and MLP."""
    around = norms(*AROUND, "pre_feedforward_layernorm", "post_feedforward_layernorm", of=offset_norm)
    return around | attention(offset_norm) | mlp("mlp", INTERMEDIATE)


def mamba2(index: int) -> Parameters:
    """A layer of Mamba 2: no attention, no MLP."""
    inner, heads = 2 * HIDDEN, 2 * HIDDEN // HEAD_DIM
    convolved = inner + 2 * STATE
    return {
        "norm.weight": norm(HIDDEN),
        "mixer.in_proj.weight": matrix(inner + convolved + heads, HIDDEN),
        "mixer.conv1d.weight": Parameter((convolved, 1, CONVOLUTION), 0.0, 0.5),
        "mixer.conv1d.bias": Parameter((convolved,), 0.0, 0.1),
        "mixer.A_log": Parameter((heads,), 0.0, 0.5),
        "mixer.D": norm(heads),
        "mixer.dt_bias": Parameter((heads,), -1.0, 0.5),
        "mixer.norm.weight": norm(inner),
        "mixer.out_proj.weight": matrix(HIDDEN, inner),
    }


def deepseek(index: int) -> Parameters:
    """A layer of DeepSeek-V3: latent attention; an MLP in the first layer, then experts and a shared one."""
    found = norms(*AROUND) | {
        "self_attn.q_a_proj.weight": matrix(Q_RANK, HIDDEN),
        "self_attn.q_a_layernorm.weight": norm(Q_RANK),
        "self_attn.q_b_proj.weight": matrix(HEADS * (NOPE + ROPE), Q_RANK),
        "self_attn.kv_a_proj_with_mqa.weight": matrix(KV_RANK + ROPE, HIDDEN),
        "self_attn.kv_a_layernorm.weight": norm(KV_RANK),
        "self_attn.kv_b_proj.weight": matrix(HEADS * (NOPE + VALUE), KV_RANK),
        "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * VALUE),
    }
    if index < 1:
        return found | mlp("mlp", INTERMEDIATE)
    shared = mlp("mlp.shared_experts", EXPERT_INTERMEDIATE)
    bias = {"mlp.gate.e_score_correction_bias": Parameter((EXPERTS,), 0.0, 0.1)}
    return found | experts() | bias | shared


# -- the table ---------------------------------------------------------------------------------------------

COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

TRANSFORMER: dict[str, Any] = {
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
}

ARCHITECTURES = {
    "tiny-qwen3": Architecture(
        "a Qwen 3 of 4 layers, drawn from a seed: norms of query and key",
        2_106_000,
        TRANSFORMER | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        qwen3,
        norm,
    ),
    "tiny-gemma3": Architecture(
        "a Gemma 3 of 4 layers, drawn from a seed: norms around attention and MLP, sliding window",
        2_109_000,
        TRANSFORMER
        | {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_local_base_freq": 10000.0,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        gemma3,
        offset_norm,
        embedding_scale=HIDDEN**0.5,
    ),
    "tiny-qwen3-moe": Architecture(
        "a Qwen 3 of 4 layers, drawn from a seed: 8 experts",
        2_911_000,
        TRANSFORMER
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": EXPERTS,
            "num_experts_per_tok": EXPERTS_A_TOKEN,
            "moe_intermediate_size": EXPERT_INTERMEDIATE,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        qwen3_moe,
        norm,
    ),
    "tiny-mamba2": Architecture(
        "a Mamba 2 of 4 layers, drawn from a seed: a state instead of attention",
        1_401_000,
        {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "num_heads": 2 * HIDDEN // HEAD_DIM,
            "head_dim": HEAD_DIM,
            "state_size": STATE,
            "n_groups": 1,
            "expand": 2,
            "conv_kernel": CONVOLUTION,
            "chunk_size": 64,
            "use_bias": False,
            "use_conv_bias": True,
            "hidden_act": "silu",
            "layer_norm_epsilon": 1e-5,
            "rms_norm": True,
        },
        mamba2,
        norm,
        Names("backbone.embeddings.weight", "backbone.layers", "backbone.norm_f.weight"),
    ),
    "tiny-deepseek": Architecture(
        "a DeepSeek-V3 of 4 layers, drawn from a seed: latent attention (MLA), 8 experts",
        5_517_000,
        {key: value for key, value in TRANSFORMER.items() if key != "head_dim"}
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_key_value_heads": HEADS,
            "q_lora_rank": Q_RANK,
            "kv_lora_rank": KV_RANK,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": VALUE,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "num_experts_per_tok": EXPERTS_A_TOKEN,
            "moe_intermediate_size": EXPERT_INTERMEDIATE,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 0,
        },
        deepseek,
        norm,
    ),
}
"""The architectures by the names of their models."""
