"""The adapter for vLLM's Model Runner V2 (`vllm/v1/worker/gpu/model_runner.py`).

As read in vLLM 0.26.0 (CUDA):

* `execute_model(scheduler_output, ..., dummy_run=...)`: dummies come through it too. A real step calls
  `prepare_inputs(scheduler_output, batch_desc)`, which returns the `InputBatch` (input_batch.py), then
  `model_state.prepare_attn(input_batch, cg_mode, ...)`, which returns the attention metadata, then runs the
  model, or replays it by `cudagraph_manager.run_fullgraph(desc)` (cudagraph_utils.py).
* `sample_tokens` calls `sample`, which computes the logits, then the speculator. It returns an `AsyncOutput`
  (async_utils.py).
* `capture_model` captures the graphs of the target and of the speculator, after `initialize_kv_cache` has
  made the managers. After that, `warmup_kernels` (warmup.py) runs made-up requests as real steps.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

from localizer.hooks.ingraph import Graphs
from localizer.hooks.replace import replace
from localizer.hooks.steps import Forward, Steps, before_capture, follow_tokens
from localizer.hooks.tables import binder, device_tables


def follow(steps: Steps, undo: ExitStack, runner: Any, graphs: Graphs | None = None) -> None:
    """Tell `steps` when steps of `runner` begin and end, until `undo` is closed."""
    execute, sample = runner.execute_model, runner.sample
    recorder = steps.recorder

    @functools.wraps(execute)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        dummy = kwargs.get("dummy_run", args[1] if len(args) > 1 else False)
        if dummy or not recorder.rounds:  # before the first round all requests are made up
            steps.dummy()
            return execute(scheduler_output, *args, **kwargs)
        steps.schedule(scheduler_output)
        try:
            output = execute(scheduler_output, *args, **kwargs)
        except BaseException:
            steps.ended()
            raise
        state = runner.execute_model_state
        if state is None:
            steps.ended()
        else:
            steps.returned(state.aux_hidden_states or ())
        return output

    @functools.wraps(sample)
    def sampling(*args: Any, **kwargs: Any) -> Any:
        try:
            return sample(*args, **kwargs)
        finally:
            steps.ended()

    replace(undo, runner, "execute_model", execute_model)
    replace(undo, runner, "sample", sampling)
    follow_tokens(steps, undo, runner)
    _follow_forward(steps, undo, runner)
    if graphs is not None:
        _prepare(steps, undo, runner, graphs)


def _follow_forward(steps: Steps, undo: ExitStack, runner: Any) -> None:
    """Begin a step's rows when its inputs and its attention metadata are there."""
    prepare, state = runner.prepare_inputs, runner.model_state
    attention = state.prepare_attn
    arguments = binder(attention)
    waiting: list[tuple[Any, Any]] = []

    @functools.wraps(prepare)
    def prepare_inputs(scheduler_output: Any, batch_desc: Any, *args: Any, **kwargs: Any) -> Any:
        batch = prepare(scheduler_output, batch_desc, *args, **kwargs)
        if steps.recorder.in_forward:
            waiting[:] = [(batch, batch_desc)]
        return batch

    @functools.wraps(attention)
    def prepare_attn(*args: Any, **kwargs: Any) -> Any:
        metadata = attention(*args, **kwargs)
        if waiting:
            batch, batch_desc = waiting.pop()
            mode = getattr(batch_desc.cg_mode, "name", str(batch_desc.cg_mode))
            requests, inputs = list(batch.req_ids), (batch.input_ids, batch.positions)
            tables = device_tables(runner, arguments(args, kwargs).get("block_tables"), len(requests))
            steps.begins(Forward(requests, *inputs, metadata, mode, batch_desc, tables))
        return metadata

    replace(undo, runner, "prepare_inputs", prepare_inputs)
    replace(undo, state, "prepare_attn", prepare_attn)


def full_sizes(manager: Any) -> list[int]:
    """Rows of the full graphs that a `CudaGraphManager` will capture."""
    plans = getattr(manager, "_capture_descs", None) or {}
    return [batch.num_tokens for mode, batches in plans.items() if mode.name == "FULL" for batch in batches]


def _prepare(steps: Steps, undo: ExitStack, runner: Any, graphs: Graphs) -> None:
    """Right before graphs are captured, prepare the taps inside of them, and follow their replays."""
    recorder = steps.recorder

    @recorder.guarded
    def replayed(desc: Any) -> None:
        if recorder.recording and recorder.in_forward:
            recorder.replays["target"] += 1
            recorder.in_graph(graphs.target.serve(desc.num_tokens, recorder.requests))

    @recorder.guarded
    def prepare() -> None:
        manager, speculator = runner.cudagraph_manager, runner.speculator
        draft = [
            size
            for name in ("prefill_cudagraph_manager", "decode_cudagraph_manager")
            for size in full_sizes(getattr(speculator, name, None))
        ]
        graphs.prepare({"target": full_sizes(manager), "draft": draft}, int(runner.max_num_reqs))
        run = manager.run_fullgraph

        @functools.wraps(run)
        def run_fullgraph(desc: Any, *args: Any, **kwargs: Any) -> Any:
            output = run(desc, *args, **kwargs)
            replayed(desc)
            return output

        replace(undo, manager, "run_fullgraph", run_fullgraph)

    before_capture(prepare, undo, runner)
