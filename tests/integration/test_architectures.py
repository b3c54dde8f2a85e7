"""Each built-in architecture is captured whole: at its boundaries, and in eager mode at every module."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from engines import COMPILED, Capturing

from localizer.diff.pipeline import diff
from localizer.sources.fault import FACTOR, MODELS, Fault, in_layer
from localizer.store.reader import Capture
from localizer.workload.architectures import ARCHITECTURES

pytestmark = pytest.mark.engine

ATTENTION = [
    *("self_attn.rotary_emb/rotated_query", "self_attn.rotary_emb/rotated_key"),
    *("self_attn.attn/query", "self_attn.attn/key", "self_attn.attn/value", "self_attn.attn/output"),
    *("self_attn.o_proj", "self_attn"),
]
NORMED = ["self_attn.qkv_proj", "self_attn.q_norm", "self_attn.k_norm", *ATTENTION]
MLP = ["mlp.gate_up_proj", "mlp.act_fn", "mlp.down_proj", "mlp"]
AFTER = ["/residual_after_attention", "post_attention_layernorm"]
CHOICE = ["mlp.experts/router_logits", "mlp.experts/expert_ids", "mlp.experts/expert_weights"]
SHARED = "mlp.experts._shared_experts._layer"

SITES = {
    "tiny": [
        "input_layernorm", "self_attn.qkv_proj", *ATTENTION, *AFTER, *MLP, "/residual",
    ],
    "tiny-qwen3": ["input_layernorm", *NORMED, *AFTER, *MLP, "/residual"],
    "tiny-gemma3": [
        "input_layernorm", *NORMED, "post_attention_layernorm", "/residual_after_attention",
        "pre_feedforward_layernorm", *MLP, "post_feedforward_layernorm", "/residual",
    ],
    "tiny-qwen3-moe": [
        "input_layernorm", *NORMED, *AFTER, "mlp.experts/hidden_states", "mlp.experts.gate", *CHOICE,
        "mlp.experts/output", "mlp.experts", "mlp", "/residual",
    ],
    "tiny-mamba2": [
        "norm", "mixer.in_proj", "mixer/projected_states", "mixer/output", "mixer.norm", "mixer.out_proj",
        "mixer", "/residual",
    ],
    "tiny-deepseek": [
        "input_layernorm", "self_attn.mla_attn.fused_qkv_a_proj", "self_attn.mla_attn.q_a_layernorm",
        "self_attn.mla_attn.kv_a_layernorm", "self_attn.mla_attn.q_b_proj",
        "self_attn.mla_attn.rotary_emb/rotated_query", "self_attn.mla_attn.rotary_emb/rotated_key",
        "self_attn.attn/query", "self_attn.attn/latent", "self_attn.attn/key_rope", "self_attn.attn/output",
        "self_attn.mla_attn.o_proj", "self_attn.mla_attn", "self_attn", *AFTER,
        "mlp.experts/hidden_states", "mlp.experts.gate", f"{SHARED}.gate_up_proj", f"{SHARED}.act_fn",
        f"{SHARED}.down_proj", SHARED, *CHOICE, "mlp.experts/shared_output", "mlp.experts/output",
        "mlp.experts", "mlp", "/residual",
    ],
}  # fmt: skip
"""Sites of layer 1 at level `module`, in execution order, but for the residual of its first norm."""

TOKENS = 16

TAKES_RESIDUAL = "input_layernorm/residual", "norm/residual"


@pytest.fixture
def modules(capturing: Capturing) -> Callable[..., Capture]:
    """A capture at level `module` with all payload."""

    def work(model: str, name: str = "parent", **options: object) -> Capture:
        settings = {"model": model, "level": "module", "payload": "all", "max_tokens": TOKENS} | options
        return capturing(f"modules-{model}-{name}", **settings)

    return work


@pytest.mark.parametrize("name", SITES)
def test_every_module_is_recorded_in_execution_order(modules: Callable[..., Capture], name: str) -> None:
    capture = modules(name)
    assert capture.manifest is not None
    assert (capture.reasons, capture.manifest.untapped) == ([], {})
    if name != "tiny":
        assert capture.manifest.engine["model_class"] == ARCHITECTURES[name].config["architectures"][0]
    sites = [site.name for site in capture.sites]
    stem = "backbone.layers.1" if name == "tiny-mamba2" else "model.layers.1"
    layer = [site.removeprefix(stem).removeprefix(".") for site in sites if site.startswith(stem)]
    first, *others = layer
    assert first in TAKES_RESIDUAL
    # the order within a side branch, such as q_norm and k_norm, is the model's
    assert sorted(others) == sorted(SITES[name])
    assert [site for site in others if not site.startswith("mlp.experts")] == [
        site for site in SITES[name] if not site.startswith("mlp.experts")
    ]
    assert sites[:2] == ["model/input_ids", "model/positions"]
    assert "embed" in sites[2]
    assert sites[-5:-3] == [f"{stem.partition('.')[0]}.{'norm_f' if 'mamba' in name else 'norm'}{part}"
                            for part in ("/residual", "")]  # fmt: skip
    silent = capture.manifest.not_applicable
    assert "logits_processor" in silent
    assert not [
        site for site in silent if site.startswith(stem) and site.endswith("residual_after_attention")
    ]


@pytest.mark.parametrize("name", SITES)
def test_the_stream_of_a_layer_is_what_the_next_norm_takes_up(
    modules: Callable[..., Capture], name: str
) -> None:
    capture = modules(name)
    table, index = capture.table, {site.name: number for number, site in enumerate(capture.sites)}
    streams = [site for site in index if site.endswith("/residual")]
    pairs = 0
    for site, following in pairwise(streams):
        if "norm" in following and "norm" not in site:
            assert np.array_equal(table.digest[:, index[site]], table.digest[:, index[following]])
            pairs += 1
    assert pairs == len([site for site in streams if "norm" not in site])


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", pytest.param("tiny-deepseek", marks=pytest.mark.slow)])
def test_taps_on_modules_change_no_token(
    capturing: Capturing, modules: Callable[..., Capture], name: str
) -> None:
    outputs = capturing(f"untapped-{name}", model=name, max_tokens=TOKENS, taps=False).outputs
    assert modules(name).outputs == outputs
    for tokens in outputs.values():
        assert len(set(tokens)) > TOKENS // 2  # neither constant nor a short cycle


def test_the_choice_of_experts_follows_from_the_router_logits(modules: Callable[..., Capture]) -> None:
    capture = modules("tiny-qwen3-moe")
    for row in range(0, len(capture.table), 7):
        logits, ids, weights = (
            capture.row_payload(f"model.layers.2.mlp.experts/{part}", row)
            for part in ("router_logits", "expert_ids", "expert_weights")
        )
        assert logits is not None
        assert ids is not None
        assert weights is not None
        logits = logits.astype(np.float32)
        best = np.sort(logits)[::-1][: len(ids)]
        assert sorted(logits[ids].tolist(), reverse=True) == best.tolist()
        expected = np.exp(logits[ids]) / np.exp(logits[ids]).sum()
        assert np.allclose(weights, expected, atol=1e-2)


def at(layer: int, attn: str = "self.attn") -> str:
    """The condition under which a line of a module that reaches the layer as `attn` belongs to one layer."""
    return f'{attn}.layer_name == "model.layers.{layer}.self_attn.attn"'


FAULTS = {
    "after the projection": (
        "tiny",
        Fault(MODELS / "llama.py", "        qkv, _ = self.qkv_proj(hidden_states)\n",
              f"qkv = qkv * {FACTOR} if {at(3)} else qkv"),
        ("model.layers.3.self_attn.qkv_proj", "model.layers.3.self_attn.rotary_emb/rotated_query"),
    ),
    "before the output projection": (
        "tiny",
        Fault(MODELS / "llama.py", "        attn_output = self.attn(q, k, v)\n",
              f"attn_output = attn_output * {FACTOR} if {at(6)} else attn_output"),
        ("model.layers.6.self_attn.attn/output", "model.layers.6.self_attn.o_proj"),
    ),
    "after the MLP": (
        "tiny", in_layer(5), ("model.layers.5.mlp", "model.layers.5/residual"),
    ),
    "between the stream and a norm": (
        "tiny",
        Fault(MODELS / "llama.py",
              "        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)\n",
              f"residual = residual * {FACTOR} if {at(2, 'self.self_attn.attn')} else residual"),
        ("model.layers.2.self_attn", "model.layers.2/residual_after_attention"),
    ),
}  # fmt: skip
FEW = ("after the MLP", "between the stream and a norm")


@pytest.mark.parametrize(
    "where",
    [pytest.param(it, marks=[] if it in FEW else [pytest.mark.slow]) for it in FAULTS],
)
def test_a_fault_is_named_between_two_modules(
    modules: Callable[..., Capture], overlay: Callable[[Fault], Path], where: str
) -> None:
    model, fault, segment = FAULTS[where]
    changed = overlay(fault)
    result = diff(modules(model, where.replace(" ", "-"), overlay=changed), modules(model))
    assert result.verdict == "diverged"
    assert result.first is not None
    assert (result.first.segment.after, result.first.segment.before) == segment
    assert result.first.unobserved.sites == []
    lines = (changed / fault.file).read_text().splitlines()
    planted = next(number for number, line in enumerate(lines, 1) if fault.line in line)
    after, before = (
        place.partition(" ")
        for place in (result.first.segment.after_code or "", result.first.segment.before_code or "")
    )
    assert after[0].startswith(f"{fault.file}:")
    assert int(after[0].rpartition(":")[2]) < planted
    if after[2] == before[2]:  # in the same function
        assert planted < int(before[0].rpartition(":")[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-mamba2", "tiny-deepseek"])
def test_compiled_boundaries_are_captured_or_named(capturing: Capturing, name: str) -> None:
    capture = capturing(f"compiled-{name}", model=name, engine=COMPILED)
    assert capture.manifest is not None
    assert (capture.reasons, capture.manifest.untapped) == ([], {})
    experts = {site for site in capture.manifest.not_applicable if ".experts/" in site}
    assert bool(experts) == (name != "tiny-mamba2")  # Python is not reached there, which is said
    kinds = {"tiny-qwen3-moe": "attn/query", "tiny-mamba2": "mixer/output", "tiny-deepseek": "attn/latent"}
    assert any(site.name.endswith(kinds[name]) for site in capture.sites)
