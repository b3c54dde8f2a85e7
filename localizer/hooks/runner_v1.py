"""The adapter for vLLM's V1 model runner (`vllm/v1/worker/gpu_model_runner.py` and its CPU subclass).

Seen on vLLM 0.28.0 and 0.32.0 (CPU): `execute_model(scheduler_output, ...)` runs the forward and returns
None, then `sample_tokens(...)` returns a `ModelRunnerOutput` with `req_ids` and `sampled_token_ids` (a list
per request).

As read in vLLM 0.26.0 (CUDA): with full graphs `load_model` puts the model into a wrapper
(`CUDAGraphWrapper`, `vllm/compilation/cuda_graph.py`; `unwrap()` gives the model), whose replay does not
reach the model's forward. Real steps, and only they, go through `GPUModelRunner._model_forward`. Graphs are
captured by `capture_model`; before that, `profile_cudagraph_memory` captures some that are thrown away.
Under async scheduling `sample_tokens` returns an `AsyncGPUModelRunnerOutput`.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch

from localizer.hooks.ingraph import Graphs
from localizer.hooks.replace import replace
from localizer.hooks.steps import Forward, Steps, before_capture, follow_tokens


def raw_model(model: Any) -> Any:
    """The module inside of vLLM's wrappers for graphs."""
    while not isinstance(model, torch.nn.Module) and callable(getattr(model, "unwrap", None)):
        model = model.unwrap()
    return model


def follow(steps: Steps, undo: ExitStack, runner: Any, graphs: Graphs | None = None) -> None:
    """Tell `steps` when steps of `runner` begin and end, until `undo` is closed."""
    execute = runner.execute_model

    @functools.wraps(execute)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        steps.schedule(scheduler_output)
        try:
            output = execute(scheduler_output, *args, **kwargs)
        finally:
            steps.ended()
        steps.sampled(output)
        return output

    replace(undo, runner, "execute_model", execute_model)
    follow_tokens(steps, undo, runner)
    wrapped = raw_model(runner.model) is not runner.model
    _follow_forward(steps, undo, runner, wrapped)
    if wrapped:
        _follow_replays(steps, undo, runner, graphs)
    if graphs is not None:
        _prepare(steps, undo, runner, graphs)


def _forward(runner: Any, inputs: dict[str, Any]) -> Forward:
    """The forward that is about to run, inside vLLM's forward context, if there is one."""
    from vllm import forward_context as contexts

    context = contexts.get_forward_context() if contexts.is_forward_context_available() else None
    mode = getattr(context, "cudagraph_runtime_mode", None)
    return Forward(
        runner.input_batch.req_ids,
        inputs.get("input_ids"),
        inputs.get("positions"),
        getattr(context, "attn_metadata", None),
        getattr(mode, "name", str(mode)),
        getattr(context, "batch_descriptor", None),
    )


def _follow_forward(steps: Steps, undo: ExitStack, runner: Any, wrapped: bool) -> None:
    """Follow the model's own forward; where the model is wrapped, only the dummy ones."""
    model, recorder = raw_model(runner.model), steps.recorder

    def pre_hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not wrapped:
            steps.begins(_forward(runner, dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs))
        elif not recorder.in_forward:
            steps.dummy()

    # a step begins, and its auxiliary states are taken, before taps on modules have their turn
    undo.callback(model.register_forward_pre_hook(pre_hook, with_kwargs=True, prepend=True).remove)

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        steps.returned(output[1])

    if getattr(runner, "use_aux_hidden_state_outputs", False) and not wrapped:
        undo.callback(model.register_forward_hook(hook, prepend=True).remove)


def _follow_replays(steps: Steps, undo: ExitStack, runner: Any, graphs: Graphs | None) -> None:
    """Follow the forward of real steps where the model may be replayed instead of called."""
    call, recorder = runner._model_forward, steps.recorder
    auxiliary = getattr(runner, "use_aux_hidden_state_outputs", False)

    @recorder.guarded
    def replayed(forward: Forward) -> None:
        if graphs is not None and recorder.recording and forward.graph == "FULL":
            rows = 0 if forward.input_ids is None else forward.input_ids.shape[0]
            recorder.in_graph(graphs.target.serve(rows, len(forward.requests)))

    @functools.wraps(call)
    def model_forward(*args: Any, **kwargs: Any) -> Any:
        forward = _forward(runner, dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs)
        steps.begins(forward)
        output = call(*args, **kwargs)
        replayed(forward)
        if auxiliary:
            steps.returned(output[1])
        return output

    replace(undo, runner, "_model_forward", model_forward)


def _prepare(steps: Steps, undo: ExitStack, runner: Any, graphs: Graphs) -> None:
    """Prepare taps inside of full graphs right before they are captured. The draft's are never full."""

    @steps.recorder.guarded
    def prepare() -> None:
        plans = runner.cudagraph_dispatcher.get_capture_descs()
        full = [batch.num_tokens for mode, batches in plans if mode.name == "FULL" for batch in batches]
        graphs.prepare({"target": full}, int(runner.max_num_reqs))

    before_capture(prepare, undo, runner)
