"""The worker extension: imported by vLLM in every worker before the worker is built.

Importing it arranges that taps are installed as soon as the worker has loaded its model, so before
profiling, warm-up and graph capture, whose forwards are counted and dropped. Its methods are reached by
`collective_rpc`.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from localizer.hooks import facts, layout, runner_v1, taps, unsupported
from localizer.hooks.lifeline import end_with
from localizer.hooks.recorder import Recorder
from localizer.hooks.sink import Sink
from localizer.wire.ring import Ring
from localizer.wire.spec import SPEC_VARIABLE, RunSpec

_ATTRIBUTE = "_localizer_recorder"


def _install(worker: Any) -> None:
    """Tap the model that `worker` has just loaded."""
    layout.check(worker)
    spec = RunSpec.read(os.environ[SPEC_VARIABLE])
    end_with(spec.parent_pid)
    recorder = Recorder(Sink(Ring(spec.ring), spec.writer_pid))
    runner = worker.model_runner
    undo = taps.install(recorder, runner, worker.vllm_config, spec.layers, spec.sites, spec.level)
    runner_v1.follow(recorder, undo, runner)
    setattr(worker, _ATTRIBUTE, recorder)


def _arrange() -> None:
    """Make every worker install its taps right after loading; does nothing the second time."""
    worker_class = layout.worker_class()
    load = worker_class.load_model
    if getattr(load, _ATTRIBUTE, False):
        return

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        unsupported.check(self)
        result = load(self, *args, **kwargs)
        if not hasattr(self, _ATTRIBUTE):
            _install(self)
        return result

    setattr(load_model, _ATTRIBUTE, True)
    worker_class.load_model = load_model


def _recorder(worker: Any) -> Recorder:
    """The recorder of a worker's taps."""
    recorder = getattr(worker, _ATTRIBUTE, None)
    if recorder is None:
        raise layout.refuse(f"{type(worker).__name__} does not load its model by Worker.load_model")
    assert isinstance(recorder, Recorder)
    return recorder


class LocalizerExtension:
    """Calls that localizer's program makes in every worker."""

    def localizer_round(self, names: dict[str, str]) -> None:
        """A round begins; `names` maps vLLM's internal request ids to localizer's."""
        recorder = _recorder(self)
        recorder.guarded(recorder.round)(names)

    def localizer_finish(self) -> dict[str, Any]:
        """The run is over: close the ring and return facts, counts and errors of this worker."""
        recorder = _recorder(self)
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
