"""Boundary taps: where Python is reached between compiled pieces, inputs and outputs of the op are recorded.

Seen on vLLM 0.28.0 and 0.32.0 (CPU). Attention layers are found through `static_forward_context`; their
`impl.forward(layer, query, key, value, kv_cache, attn_metadata, output=...)` is looked up at each call, so
that an attribute of the instance stands in for it in eager and in compiled mode.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from localizer.hooks.recorder import Recorder
from localizer.hooks.replace import replace
from localizer.wire.spec import HIDDEN, LOGITS, SITE_KINDS, parse_indices

FORWARD_PARAMETERS = ["layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"]
"""First parameters of every known `AttentionImpl.forward`."""


class UnknownLayout(RuntimeError):
    """This vLLM arranges something differently from every version seen; the text names version and place."""


def attention_layers(vllm_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of each attention layer of `model`, in the order in which the model made them."""
    members = {id(module) for module in model.modules()}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if id(layer) in members and hasattr(getattr(layer, "impl", None), "forward"):
            yield name, layer


def install(recorder: Recorder, runner: Any, vllm_config: Any, selection: str) -> ExitStack:
    """Tap the selected attention layers, the model's inputs, its final hidden states and its logits.

    Closing what is returned takes all taps away.
    """
    undo = ExitStack()
    model = runner.model
    layers = list(attention_layers(vllm_config, model))
    chosen = [layers[index] for index in parse_indices(selection, len(layers))]
    sites: list[str] = []
    absent: dict[str, str] = {}
    for name, layer in chosen:
        shared = getattr(layer, "kv_sharing_target_layer_name", None)
        for kind in SITE_KINDS:
            if shared and kind in ("key", "value"):
                absent[f"{name}/{kind}"] = f"the layer shares the KV cache of {shared}"
            else:
                sites.append(f"{name}/{kind}")
    recorder.register(sites, absent)
    for name, layer in chosen:
        _tap_attention(recorder, undo, name, layer, frozenset(sites))
    _tap_inputs(recorder, undo, runner, model)
    _tap_logits(recorder, undo, model)
    return undo


def _tap_attention(recorder: Recorder, undo: ExitStack, name: str, layer: Any, sites: frozenset[str]) -> None:
    impl = layer.impl
    forward = impl.forward
    parameters = list(inspect.signature(forward).parameters)
    if parameters[: len(FORWARD_PARAMETERS)] != FORWARD_PARAMETERS:
        import vllm

        raise UnknownLayout(
            f"vLLM {vllm.__version__}: {type(impl).__name__}.forward takes {', '.join(parameters)}, "
            "a layout this localizer does not know"
        )
    query_site, key_site, value_site, output_site = (f"{name}/{kind}" for kind in SITE_KINDS)

    @recorder.guarded
    def before(query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None) -> None:
        recorder.rows(query_site, query)
        if key_site in sites and key is not None and value is not None:
            recorder.rows(key_site, key)
            recorder.rows(value_site, value)

    @recorder.guarded
    def after(output: torch.Tensor) -> None:
        recorder.rows(output_site, output)

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
        if not recorder.recording:
            return forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kw)
        before(query, key, value)
        result = forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kw)
        after(output)
        return result

    replace(undo, impl, "forward", tapped)


def _tap_inputs(recorder: Recorder, undo: ExitStack, runner: Any, model: torch.nn.Module) -> None:
    @recorder.guarded
    def begins(input_ids: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        if input_ids is None or positions is None:
            raise RuntimeError(
                "the model ran without input ids, as with prompt embeddings, which are not supported"
            )
        recorder.forward_begins(runner.input_batch.req_ids, input_ids, positions)

    def pre_hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = dict(zip(("input_ids", "positions"), args, strict=False))
        begins(
            kwargs.get("input_ids", names.get("input_ids")), kwargs.get("positions", names.get("positions"))
        )

    undo.callback(model.register_forward_pre_hook(pre_hook, with_kwargs=True).remove)


def _tap_logits(recorder: Recorder, undo: ExitStack, model: Any) -> None:
    compute = model.compute_logits

    hidden_rows = recorder.guarded(functools.partial(recorder.logit_rows, HIDDEN))
    logit_rows = recorder.guarded(functools.partial(recorder.logit_rows, LOGITS))

    @functools.wraps(compute)
    def tapped(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wanted = recorder.recording and recorder.in_forward
        if wanted:
            hidden_rows(hidden_states)
        logits = compute(hidden_states, *args, **kwargs)
        if wanted and logits is not None:
            logit_rows(logits)
        return logits

    replace(undo, model, "compute_logits", tapped)
