"""Boundary taps: where Python is reached between compiled pieces, inputs and outputs of the op are recorded.

Seen on vLLM 0.28.0 and 0.32.0 (CPU). Attention layers are found through `static_forward_context`; their
`impl.forward(layer, query, key, value, kv_cache, attn_metadata, output=...)` is looked up at each call, so
that an attribute of the instance stands in for it in eager and in compiled mode. `layout.check` has made sure
that all of this is as expected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch

from localizer.hooks import drafts
from localizer.hooks.logits import tap_logits
from localizer.hooks.recorder import Recorder
from localizer.hooks.replace import replace
from localizer.wire.spec import (
    ALL_ROWS,
    AUXILIARY,
    DRAFT,
    DRAFT_LOGIT_ROWS,
    DRAFT_ROWS,
    HIDDEN,
    INPUT_IDS,
    LOGIT_ROWS,
    LOGITS,
    POSITIONS,
    SITE_KINDS,
    TOKEN,
    TOKEN_ROWS,
    parse_indices,
)


def attention_layers(vllm_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of each attention layer of `model`, in the order in which the model made them."""
    members = {id(module) for module in model.modules()}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if id(layer) in members and hasattr(getattr(layer, "impl", None), "forward"):
            yield name, layer


def untapped_layers(vllm_config: Any, model: torch.nn.Module) -> dict[str, str]:
    """Layers of `model` that keep a KV cache or another state and that no tap knows: name -> class."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    members = {id(module) for module in model.modules()}
    known = dict(attention_layers(vllm_config, model))
    return {
        name: type(layer).__name__
        for name, layer in vllm_config.compilation_config.static_forward_context.items()
        if id(layer) in members and name not in known and isinstance(layer, AttentionLayerBase)
    }


def install(
    recorder: Recorder, runner: Any, vllm_config: Any, selection: str, patterns: Sequence[str] = ("*",)
) -> ExitStack:
    """Tap inputs, attention layers, final hidden states and logits, of the target and of its draft.

    The selection is of the target's attention layers; a draft's are all tapped. Only sites that match one of
    the shell patterns are recorded.
    Closing what is returned takes all taps away.
    """
    undo = ExitStack()
    layers = list(attention_layers(vllm_config, runner.model))
    chosen = [layers[index] for index in parse_indices(selection, len(layers))]
    auxiliary = [f"{AUXILIARY}/{index}" for index in range(auxiliary_count(runner))]
    boundaries, absent = _boundaries(chosen, "")
    sites = [(INPUT_IDS, ALL_ROWS), (POSITIONS, ALL_ROWS)]
    sites += [(name, ALL_ROWS) for name in [*boundaries, *auxiliary]]
    sites += [(HIDDEN, LOGIT_ROWS), (LOGITS, LOGIT_ROWS), (TOKEN, TOKEN_ROWS)]
    draft = drafts.draft_model(runner)
    draft_layers = [] if draft is None else list(attention_layers(vllm_config, draft))
    if draft_layers:
        names, missing = _boundaries(draft_layers, DRAFT)
        absent |= missing
        sites += [(name, DRAFT_ROWS) for name in [DRAFT + INPUT_IDS, DRAFT + POSITIONS, *names]]
        sites += [(DRAFT + HIDDEN, DRAFT_LOGIT_ROWS), (DRAFT + LOGITS, DRAFT_LOGIT_ROWS)]
    untapped = untapped_layers(vllm_config, runner.model)
    if draft is not None:
        untapped |= {DRAFT + name: kind for name, kind in untapped_layers(vllm_config, draft).items()}
    sites = [(name, rows) for name, rows in sites if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not sites:
        raise ValueError(f"no site matches {' or '.join(patterns)}")
    recorder.register(sites, absent, untapped)
    known = frozenset(name for name, _ in sites)
    for name, layer in chosen:
        _tap_attention(undo, name, layer, known, recorder, recorder.rows, lambda: recorder.recording)
    for name, layer in draft_layers:
        _tap_attention(
            undo, DRAFT + name, layer, known, recorder, recorder.draft_rows, lambda: recorder.drafting
        )
    _tap_forward(recorder, undo, runner, auxiliary)
    tap_logits(
        recorder,
        undo,
        runner.model,
        (HIDDEN, LOGITS),
        recorder.logit_rows,
        lambda: recorder.recording and recorder.in_forward,
    )
    if draft_layers:
        drafts.follow(recorder, undo, runner, draft_layers[0][0])
    return undo


def auxiliary_count(runner: Any) -> int:
    """How many auxiliary hidden states the target's forward returns for an EAGLE3 draft."""
    if not getattr(runner, "use_aux_hidden_state_outputs", False):
        return 0
    holder = getattr(runner.model, "model", runner.model)
    return len(getattr(holder, "aux_hidden_state_layers", ()))


def _boundaries(layers: Sequence[tuple[str, Any]], prefix: str) -> tuple[list[str], dict[str, str]]:
    """Sites of attention layers, and those that a layer does not have, with the reason."""
    sites: list[str] = []
    absent: dict[str, str] = {}
    for name, layer in layers:
        shared = getattr(layer, "kv_sharing_target_layer_name", None)
        for kind in SITE_KINDS:
            if shared and kind in ("key", "value"):
                absent[f"{prefix}{name}/{kind}"] = f"the layer shares the KV cache of {shared}"
            else:
                sites.append(f"{prefix}{name}/{kind}")
    return sites, absent


def _tap_attention(
    undo: ExitStack,
    name: str,
    layer: Any,
    sites: frozenset[str],
    recorder: Recorder,
    rows: Callable[[str, torch.Tensor], None],
    wanted: Callable[[], bool],
) -> None:
    """Record a layer's query, key, value and output through `rows` while `wanted()` holds."""
    impl = layer.impl
    forward = impl.forward
    query_site, key_site, value_site, output_site = (f"{name}/{kind}" for kind in SITE_KINDS)

    @recorder.guarded
    def before(query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None) -> None:
        rows(query_site, query)
        if key_site in sites and key is not None and value is not None:
            rows(key_site, key)
            rows(value_site, value)

    @recorder.guarded
    def after(output: torch.Tensor) -> None:
        rows(output_site, output)

    @functools.wraps(forward)
    def tapped(
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        if not wanted():
            return forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kw)
        before(query, key, value)
        result = forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kw)
        after(output)
        return result

    replace(undo, impl, "forward", tapped)


def _tap_forward(recorder: Recorder, undo: ExitStack, runner: Any, auxiliary: Sequence[str]) -> None:
    """Begin a step's rows with the inputs of the target's forward; record its auxiliary hidden states."""
    model = runner.model

    @recorder.guarded
    def begins(input_ids: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        if input_ids is None or positions is None:
            raise RuntimeError(
                "the model ran without input ids, as with prompt embeddings, which are not supported"
            )
        recorder.forward_begins(runner.input_batch.req_ids, input_ids, positions)

    def pre_hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        begins(named.get("input_ids"), named.get("positions"))

    undo.callback(model.register_forward_pre_hook(pre_hook, with_kwargs=True).remove)

    @recorder.guarded
    def returned(output: Any) -> None:
        if recorder.recording and recorder.in_forward:
            for site, states in zip(auxiliary, output[1], strict=True):
                recorder.rows(site, states)

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        returned(output)

    if auxiliary:
        undo.callback(model.register_forward_hook(hook).remove)
