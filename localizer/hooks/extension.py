"""The worker extension: imported by vLLM in every worker before the worker is built.

Importing it arranges that taps are installed as soon as the worker has loaded its model, so before
profiling, warm-up and graph capture, whose forwards are counted and dropped. Its methods are reached by
`collective_rpc`.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from localizer.hooks import facts, runner_v1, taps
from localizer.hooks.lifeline import end_with
from localizer.hooks.recorder import Recorder
from localizer.hooks.sink import Sink
from localizer.wire.ring import Ring
from localizer.wire.spec import SPEC_VARIABLE, RunSpec

_ATTRIBUTE = "_localizer_recorder"


def _install(worker: Any) -> None:
    """Tap the model that `worker` has just loaded."""
    spec = RunSpec.read(os.environ[SPEC_VARIABLE])
    end_with(spec.parent_pid)
    recorder = Recorder(Sink(Ring(spec.ring), spec.writer_pid))
    runner = worker.model_runner
    if not hasattr(runner, "input_batch") or not hasattr(runner, "sample_tokens"):
        raise taps.UnknownLayout(
            f"vLLM {facts.versions()['vllm']}: {type(runner).__module__}.{type(runner).__qualname__} "
            "is a model runner this localizer does not know"
        )
    undo = taps.install(recorder, runner, worker.vllm_config, spec.layers, spec.sites)
    runner_v1.follow(recorder, undo, runner)
    setattr(worker, _ATTRIBUTE, recorder)


def _arrange() -> None:
    """Make every worker install its taps right after loading; does nothing the second time."""
    from vllm.v1.worker.gpu_worker import Worker

    load = Worker.load_model
    if getattr(load, _ATTRIBUTE, False):
        return

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        if not hasattr(self, _ATTRIBUTE):
            _install(self)
        return result

    setattr(load_model, _ATTRIBUTE, True)
    Worker.load_model = load_model


class LocalizerExtension:
    """Calls that localizer's program makes in every worker."""

    def localizer_round(self, names: dict[str, str]) -> None:
        """A round begins; `names` maps vLLM's internal request ids to localizer's."""
        recorder = getattr(self, _ATTRIBUTE)
        recorder.guarded(recorder.round)(names)

    def localizer_finish(self) -> dict[str, Any]:
        """The run is over: close the ring and return facts, counts and errors of this worker."""
        recorder = getattr(self, _ATTRIBUTE)
        recorder.guarded(recorder.finish)()
        try:
            engine = facts.engine_facts(self)
        except Exception as error:  # another version's layout must not cost the run
            engine = {}
            recorder.errors.append(f"facts of the engine are missing: {type(error).__name__}: {error}")
        return {
            "engine": engine,
            "dummies": recorder.dummies,
            "errors": recorder.errors,
            "peak_memory": facts.peak_memory(),
        }


_arrange()
