"""The adapter for vLLM's V1 model runner (`vllm/v1/worker/gpu_model_runner.py` and its CPU subclass).

Seen on vLLM 0.28.0 and 0.32.0: `execute_model(scheduler_output, ...)` runs the forward and returns None,
then `sample_tokens(...)` returns a `ModelRunnerOutput` with `req_ids` and `sampled_token_ids` (a list per
request).
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

from localizer.hooks.recorder import Recorder
from localizer.hooks.replace import replace


def follow(recorder: Recorder, undo: ExitStack, runner: Any) -> None:
    """Tell `recorder` when steps of `runner` begin and end, until `undo` is closed."""
    execute, sample = runner.execute_model, runner.sample_tokens
    schedule = recorder.guarded(recorder.schedule)
    ended = recorder.guarded(recorder.forward_ended)

    @recorder.guarded
    def sampled(output: Any) -> None:
        tokens = getattr(output, "sampled_token_ids", None)
        if tokens is not None:
            recorder.sampled(output.req_ids, tokens)

    @functools.wraps(execute)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        schedule(scheduler_output)
        try:
            output = execute(scheduler_output, *args, **kwargs)
        finally:
            ended()
        sampled(output)
        return output

    @functools.wraps(sample)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        sampled(output)
        return output

    replace(undo, runner, "execute_model", execute_model)
    replace(undo, runner, "sample_tokens", sample_tokens)
