"""The draft steps of Model Runner V2's speculator.

As read in vLLM 0.26.0, `AutoRegressiveSpeculator`
(`vllm/v1/worker/gpu/spec_decode/autoregressive/speculator.py`): `propose(input_batch, ...)` runs the first
draft step on the target's rows, rejected ones too, by `_prefill(num_reqs, num_tokens, ...)` or, as a full
graph, `prefill_cudagraph_manager.run_fullgraph(desc)`; then each other one on one row a request, by
`_generate_draft(num_reqs, num_tokens_padded, ...)` or `decode_cudagraph_manager.run_fullgraph(desc)`. Inputs
lie in `input_buffers`; those of a draft step are there before it runs, and input ids run ahead by one. A
full graph holds logits and the choice of tokens as well.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from localizer.hooks.ingraph import Graphs
from localizer.hooks.recorder import Recorder
from localizer.hooks.replace import replace

STEPS = {"_prefill": ["num_reqs", "num_tokens"], "_generate_draft": ["num_reqs", "num_tokens_padded"]}
"""Methods that run a draft step, with their first parameters."""

MANAGERS = ("prefill_cudagraph_manager", "decode_cudagraph_manager")


def unknown(speculator: Any) -> str:
    """Why the draft steps of a speculator cannot be followed; empty if they can be."""
    kind = type(speculator).__name__
    for name, parameters in STEPS.items():
        method = getattr(speculator, name, None)
        if (
            not callable(method)
            or list(inspect.signature(method).parameters)[: len(parameters)] != parameters
        ):
            return f"{kind}, whose draft steps no adapter knows"
    if not hasattr(speculator, "input_buffers") or not callable(getattr(speculator, "propose", None)):
        return f"{kind}, whose inputs no adapter knows"
    return ""


class _Proposal:
    """The proposal that is under way: the requests, and the rows of each in the first draft step."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.counts: list[int] = []


def follow(recorder: Recorder, undo: ExitStack, runner: Any, graphs: Graphs | None = None) -> None:
    """Record inputs and tokens of each draft step, and what full graphs leave, until `undo` is closed."""
    speculator, under_way = runner.speculator, _Proposal()

    @recorder.guarded
    def begins(first: bool, padded: int) -> None:
        if not recorder.recording or not under_way.requests:
            return
        buffers = speculator.input_buffers
        counts = under_way.counts if first else [1] * len(under_way.requests)
        inputs = buffers.input_ids[:padded], buffers.positions[:padded]
        recorder.draft_begins(under_way.requests, counts, 0, *inputs)

    @recorder.guarded
    def replayed(rows: int) -> None:
        if recorder.drafting and graphs is not None:
            recorder.replays["draft"] += 1
            graphs.draft.serve(rows, len(under_way.requests))

    def step(name: str, first: bool) -> None:
        """Stand in for a method that runs a draft step."""
        run = getattr(speculator, name)

        @functools.wraps(run)
        def stepped(num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            begins(first, num_tokens)
            return run(num_reqs, num_tokens, *args, **kwargs)

        replace(undo, speculator, name, stepped)

    def replays(manager: Any, first: bool) -> None:
        """Stand in for the replay of a draft step."""
        run = manager.run_fullgraph

        @functools.wraps(run)
        def run_fullgraph(desc: Any, *args: Any, **kwargs: Any) -> Any:
            begins(first, desc.num_tokens)
            output = run(desc, *args, **kwargs)
            replayed(desc.num_tokens)
            return output

        replace(undo, manager, "run_fullgraph", run_fullgraph)

    for name in STEPS:
        step(name, name == "_prefill")
    prepare = speculator.init_cudagraph_manager

    @functools.wraps(prepare)
    def init_cudagraph_manager(*args: Any, **kwargs: Any) -> Any:
        result = prepare(*args, **kwargs)
        for name in MANAGERS:
            manager = getattr(speculator, name, None)
            if manager is not None:
                replays(manager, name == MANAGERS[0])
        return result

    replace(undo, speculator, "init_cudagraph_manager", init_cudagraph_manager)
    _follow_proposals(recorder, undo, speculator, under_way)


def _follow_proposals(recorder: Recorder, undo: ExitStack, speculator: Any, under_way: _Proposal) -> None:
    """Follow `propose`: whose rows the draft steps have, and what comes out."""
    propose: Callable[..., Any] = speculator.propose

    @recorder.guarded
    def begins(batch: Any) -> None:
        if recorder.recording:
            under_way.requests = list(batch.req_ids)
            under_way.counts = _counts(batch.num_scheduled_tokens)

    @recorder.guarded
    def proposed(tokens: Any) -> None:
        if recorder.recording and under_way.requests:
            recorder.proposed(under_way.requests, tokens)
        under_way.requests = []

    @functools.wraps(propose)
    def tapped(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        begins(input_batch)
        tokens = propose(input_batch, *args, **kwargs)
        proposed(tokens)
        return tokens

    replace(undo, speculator, "propose", tapped)


def _counts(scheduled: Sequence[int]) -> list[int]:
    return [int(count) for count in scheduled]
