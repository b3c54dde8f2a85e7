"""Taps on the draft model of speculative decoding: its inputs, attention layers, hidden states and logits.

Seen on vLLM 0.28.0 and 0.32.0 (CPU), with EAGLE3 and a draft model: `runner.drafter.propose(...)` runs
`runner.drafter.model` once for each draft step, inside the step whose tokens were just sampled. The first
draft step runs on the target's rows (rejected ones too), with input ids that run ahead by one for EAGLE, or
with one more row a request for a draft model; each later one on one row a request. The attention metadata
tells the rows.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch

from localizer.hooks.logits import tap_logits
from localizer.hooks.metadata import row_counts
from localizer.hooks.recorder import Recorder
from localizer.hooks.replace import replace
from localizer.wire.spec import DRAFT, HIDDEN, LOGITS


def draft_model(runner: Any) -> torch.nn.Module | None:
    """The module that proposes tokens, if a module does (n-gram proposals, for one, need none)."""
    model = getattr(getattr(runner, "drafter", None), "model", None)
    return model if isinstance(model, torch.nn.Module) else None


def follow(recorder: Recorder, undo: ExitStack, runner: Any, layer: str) -> None:
    """Record the draft's inputs, hidden states, logits and tokens, until `undo` is closed.

    Args:
        recorder: where rows go; the draft's sites are registered.
        undo: takes the taps away again.
        runner: the V1 model runner, whose drafter is a model.
        layer: name of one of the draft's attention layers, whose metadata tells the rows of each request.
    """
    from vllm.forward_context import get_forward_context

    drafter = runner.drafter
    model = drafter.model
    extra = int(getattr(drafter, "net_num_new_slots_per_request", 0))

    @recorder.guarded
    def begins(input_ids: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        if not recorder.recording:
            return
        if input_ids is None or positions is None:
            raise RuntimeError("the draft model ran without input ids, which is not supported")
        counts = row_counts(get_forward_context(), layer)
        recorder.draft_begins(runner.input_batch.req_ids, counts, extra, input_ids, positions)

    def pre_hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begins(kwargs.get("input_ids"), kwargs.get("positions"))

    undo.callback(model.register_forward_pre_hook(pre_hook, with_kwargs=True).remove)

    sites = (DRAFT + HIDDEN, DRAFT + LOGITS)
    tap_logits(recorder, undo, model, sites, recorder.draft_logit_rows, lambda: recorder.drafting)

    propose = drafter.propose

    @recorder.guarded
    def proposed(tokens: Any) -> None:
        if recorder.recording and isinstance(tokens, torch.Tensor):
            recorder.proposed(runner.input_batch.req_ids, tokens.tolist())

    @functools.wraps(propose)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        tokens = propose(*args, **kwargs)
        proposed(tokens)
        return tokens

    replace(undo, drafter, "propose", tapped)
