"""Taps on the draft model of speculative decoding: its inputs, attention layers, hidden states and logits.

Seen on vLLM 0.28.0 and 0.32.0 (CPU, V1 model runner), with EAGLE3 and a draft model:
`runner.drafter.propose(...)` runs `runner.drafter.model` once for each draft step, inside the step whose
tokens were just sampled. The first draft step runs on the target's rows (rejected ones too), with input ids
that run ahead by one for EAGLE, or with one more row a request for a draft model; each later one on one row
a request. The attention metadata tells the rows. Model Runner V2 has a speculator instead: `drafts_v2`.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch

from localizer.hooks import drafts_v2
from localizer.hooks.ingraph import Graphs
from localizer.hooks.logits import tap_logits
from localizer.hooks.metadata import row_counts
from localizer.hooks.recorder import Recorder
from localizer.hooks.replace import replace
from localizer.hooks.runner_v1 import raw_model
from localizer.wire.spec import DRAFT, HIDDEN, LOGITS


def draft_model(runner: Any) -> torch.nn.Module | None:
    """The module that proposes tokens, if a module does (n-gram proposals, for one, need none)."""
    proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model = raw_model(getattr(proposer, "model", None))
    return model if isinstance(model, torch.nn.Module) else None


def unknown(runner: Any) -> str:
    """Why the draft of this runner cannot be followed; empty if it can be."""
    return drafts_v2.unknown(runner.speculator) if getattr(runner, "speculator", None) is not None else ""


def follow(
    recorder: Recorder, undo: ExitStack, runner: Any, layer: str, graphs: Graphs | None = None
) -> None:
    """Record the draft's inputs, hidden states, logits and tokens, until `undo` is closed.

    Args:
        recorder: where rows go; the draft's sites are registered.
        undo: takes the taps away again.
        runner: the model runner, whose draft is a model.
        layer: name of one of the draft's attention layers, whose metadata tells the rows of each request.
        graphs: the taps inside of full graphs, if there are any.
    """
    model: Any = draft_model(runner)
    sites = (DRAFT + HIDDEN, DRAFT + LOGITS)
    group = None if graphs is None else graphs.draft
    tap_logits(recorder, undo, model, sites, recorder.draft_logit_rows, lambda: recorder.drafting, group)
    if getattr(runner, "speculator", None) is not None:
        drafts_v2.follow(recorder, undo, runner, graphs)
    else:
        _follow(recorder, undo, runner, model, layer)


def _follow(recorder: Recorder, undo: ExitStack, runner: Any, model: Any, layer: str) -> None:
    """Follow the draft steps of the V1 runner's drafter."""
    from vllm.forward_context import get_forward_context

    drafter = runner.drafter
    extra = int(getattr(drafter, "net_num_new_slots_per_request", 0))
    first: dict[str, list[int] | None] = {"counts": None}

    @recorder.guarded
    def begins(input_ids: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        if not recorder.recording:
            return
        if input_ids is None or positions is None:
            raise RuntimeError("the draft model ran without input ids, which is not supported")
        requests = runner.input_batch.req_ids
        if input_ids.is_cpu:
            counts = row_counts(get_forward_context(), layer)
        else:  # the metadata lies on the device, which is not waited for
            counts = first["counts"] or [1] * len(requests)
            first["counts"] = None
        recorder.draft_begins(requests, counts, extra, input_ids, positions)

    def pre_hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begins(kwargs.get("input_ids"), kwargs.get("positions"))

    undo.callback(model.register_forward_pre_hook(pre_hook, with_kwargs=True).remove)

    propose = drafter.propose

    @recorder.guarded
    def looks(kwargs: dict[str, Any]) -> None:
        starts = getattr(kwargs.get("common_attn_metadata"), "query_start_loc_cpu", None)
        first["counts"] = None if starts is None else rows_of(starts, len(runner.input_batch.req_ids), extra)

    @recorder.guarded
    def proposed(tokens: Any) -> None:
        if recorder.recording and isinstance(tokens, torch.Tensor):
            recorder.proposed(runner.input_batch.req_ids, tokens)

    @functools.wraps(propose)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        looks(kwargs)
        tokens = propose(*args, **kwargs)
        proposed(tokens)
        return tokens

    replace(undo, drafter, "propose", tapped)


def rows_of(starts: torch.Tensor, requests: int, extra: int) -> list[int]:
    """Rows of each request in the first draft step, from where they start on the host, [requests + 1]."""
    return [end - start + extra for start, end in pairwise(starts[: requests + 1].tolist())]
