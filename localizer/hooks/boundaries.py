"""The registry of boundaries: which ops of a layer run in Python between compiled pieces, and what they take.

Seen on vLLM 0.28.0 and 0.32.0 (CPU). Layers are found in `static_forward_context`. Each op is a method that
vLLM looks up at each call, so that an attribute of the instance stands in for it:

* attention: `layer.impl.forward(layer, query, key, value, kv_cache, attn_metadata, output, ...)`
* latent attention (MLA): `layer.forward_impl(q, k_c_normed, k_pe, kv_cache, attn_metadata, output, ...)`
* state space (Mamba 2): `layer.conv_ssm_forward(projected_states, output)`
* experts (MoE): `layer._forward_impl(hidden_states, router_logits, ...)`, inside it
  `layer.router.select_experts(hidden_states, router_logits, ...)`; these are called by compiled code directly
  or by an op inside a compiled piece, so that Python is reached only without compilation.

A new kind of layer is one more function in `KINDS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from localizer.wire.spec import (
    CHOICE_KINDS,
    EXPERT_KINDS,
    LATENT_KINDS,
    SITE_KINDS,
    STATE_SPACE_KINDS,
    parse_indices,
)

COMPILED = "it is computed inside compiled code, where no tap is reached"
CHOOSES_ITSELF = "the kernel of this layer chooses the experts itself"

READING = ("FlashAttentionImpl", "TritonAttentionImpl")
"""Implementations of attention in `vllm.v1.attention.backends` that only read query, key and value, by the
sources of 0.26.0 and 0.32.0; `localizer.hooks.unchanged` checks it in each run."""


@dataclass(frozen=True)
class Op:
    """One method whose tensors are recorded.

    Attributes:
        owner: the instance on which the method is looked up.
        method: its name.
        before: (parameter, part) of tensors recorded before the call.
        after: (parameter, part) of tensors that the call fills, recorded after it.
        returned: parts of the tensors that the call returns, recorded after it; where it returns fewer, they
            are the last ones.
        reads: whether the call leaves the tensors that are recorded before it as they are.
    """

    owner: Any
    method: str
    before: tuple[tuple[str, str], ...] = ()
    after: tuple[tuple[str, str], ...] = ()
    returned: tuple[str, ...] = ()
    reads: bool = False

    def fits(self) -> bool:
        """Whether the method is there and takes these parameters."""
        method = getattr(self.owner, self.method, None)
        if not callable(method):
            return False
        there = inspect.signature(method).parameters
        return all(name in there for name, _ in (*self.before, *self.after))


@dataclass(frozen=True)
class Boundary:
    """A layer whose ops are tapped.

    Attributes:
        name: of the layer, as in `static_forward_context`.
        layer: the layer.
        ops: what is tapped of it.
        parts: its sites' parts, in execution order.
        absent: parts that it does not have, with the reason.
        mixes: whether it mixes tokens; such layers are those that `--layers` counts.
        whole: whether what the layer returns as a module is its part `output`.
        heads: whether its parts consist of heads: query and output of the query's, key and value of theirs.
    """

    name: str
    layer: Any
    ops: tuple[Op, ...]
    parts: tuple[str, ...]
    absent: dict[str, str] = field(default_factory=dict)
    mixes: bool = True
    whole: bool = True
    heads: bool = False


def _attention(name: str, layer: Any, eager: bool) -> Boundary | None:
    impl = getattr(layer, "impl", None)
    if not hasattr(impl, "forward"):
        return None
    shared = getattr(layer, "kv_sharing_target_layer_name", None)
    reason = f"the layer shares the KV cache of {shared}"
    absent = dict.fromkeys(("key", "value"), reason) if shared else {}
    before = tuple((part, part) for part in SITE_KINDS[:-1] if part not in absent)
    parts = tuple(part for part in SITE_KINDS if part not in absent)
    kind = type(impl)
    reads = kind.__name__ in READING and kind.__module__.startswith("vllm.v1.attention.backends.")
    op = Op(impl, "forward", before, (("output", "output"),), reads=reads)
    return Boundary(name, layer, (op,), parts, absent, heads=True)


def _latent_attention(name: str, layer: Any, eager: bool) -> Boundary | None:
    before = ("q", "query"), ("k_c_normed", "latent"), ("k_pe", "key_rope")
    op = Op(layer, "forward_impl", before, (("output", "output"),))
    if not op.fits() or (getattr(layer, "use_direct_call", False) and not eager):
        return None
    return Boundary(name, layer, (op,), LATENT_KINDS)


def _state_space(name: str, layer: Any, eager: bool) -> Boundary | None:
    before = (("projected_states", "projected_states"),)
    op = Op(layer, "conv_ssm_forward", before, (("output", "output"),))
    return Boundary(name, layer, (op,), STATE_SPACE_KINDS, whole=False) if op.fits() else None


def _experts(name: str, layer: Any, eager: bool) -> Boundary | None:
    enters = (("hidden_states", "hidden_states"),)
    shared = getattr(layer, "_shared_experts", None) is not None
    returned = ("shared_output", "output") if shared else ("output",)
    compute = Op(layer, "_forward_impl", enters, returned=returned)
    choose = Op(
        getattr(layer, "router", None),
        "select_experts",
        (("router_logits", "router_logits"),),
        returned=("expert_weights", "expert_ids"),
    )
    if not (compute.fits() and choose.fits()):
        return None
    absent: dict[str, str] = {}
    ops: tuple[Op, ...] = (compute, choose)
    if not eager:
        ops, absent = (), dict.fromkeys(EXPERT_KINDS, COMPILED)
    elif getattr(getattr(layer, "_quant_method", None), "is_monolithic", False):
        ops, absent = (compute,), dict.fromkeys(CHOICE_KINDS, CHOOSES_ITSELF)
    there = [part for part in EXPERT_KINDS if part not in absent and (shared or part != "shared_output")]
    return Boundary(name, layer, ops, tuple(there), absent, mixes=False, whole=False)


KINDS: tuple[Callable[[str, Any, bool], Boundary | None], ...] = (
    _attention,
    _latent_attention,
    _state_space,
    _experts,
)
"""For each kind of layer: its boundary, or None for a layer of another kind."""


def is_eager(vllm_config: Any) -> bool:
    """Whether nothing is compiled: every module and op of the model runs in Python."""
    mode = getattr(vllm_config.compilation_config, "mode", None)
    return mode is None or int(mode) == 0


def boundaries(vllm_config: Any, model: torch.nn.Module) -> tuple[list[Boundary], dict[str, str]]:
    """The layers of `model` with a boundary, in the order in which the model made them; the others' classes.

    The others are those that keep a KV cache or another state, or compute in an op, and that no kind knows.
    """
    members = {id(module) for module in model.modules()}
    eager = is_eager(vllm_config)
    known: list[Boundary] = []
    unknown: dict[str, str] = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if id(layer) in members:
            found = next(_kinds(name, layer, eager), None)
            if found is not None:
                known.append(found)
            else:
                unknown[name] = type(layer).__name__
    return known, unknown


def _kinds(name: str, layer: Any, eager: bool) -> Iterator[Boundary]:
    for kind in KINDS:
        found = kind(name, layer, eager)
        if found is not None:
            yield found


def choose(found: Sequence[Boundary], selection: str) -> list[Boundary]:
    """The layers that mix tokens, of those `found`, that `--layers` names.

    Raises:
        ValueError: the selection is malformed or names a layer that is not there.
    """
    mixing = [boundary for boundary in found if boundary.mixes]
    return [mixing[index] for index in parse_indices(selection, len(mixing))]


def block(name: str) -> str:
    """The decoder layer that a module belongs to: its name up to the first number, or empty."""
    pieces = name.split(".")
    numbered = [index for index, piece in enumerate(pieces) if piece.isdecimal()]
    return ".".join(pieces[: numbered[0] + 1]) if numbered else ""
