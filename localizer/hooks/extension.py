"""The worker extension: imported by vLLM in every worker before the worker is built.

Importing it arranges that taps are installed as soon as the worker has loaded its model, so before
profiling, warm-up and graph capture, whose forwards are counted and dropped. Its methods are reached by
`collective_rpc`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from localizer.hooks import (
    compiled,
    counts,
    facts,
    kvcache,
    layout,
    loaded,
    probes,
    resolved,
    rowdigest,
    steps,
    taps,
    trace,
    weights,
)
from localizer.hooks import unsupported as refusals
from localizer.hooks.boundaries import boundaries, choose
from localizer.hooks.device import CudaTransport, DeviceSink
from localizer.hooks.ingraph import Graphs
from localizer.hooks.lifeline import end_with
from localizer.hooks.phases import ChangesWorker
from localizer.hooks.recorder import Recorder
from localizer.hooks.runner_v1 import raw_model
from localizer.hooks.sink import Channel, Sink
from localizer.wire.ring import Ring
from localizer.wire.spec import DEVICE, SPEC_VARIABLE, RunSpec

_ATTRIBUTE, _CONTENTS, _GRAPHS = "_localizer_recorder", "_localizer_contents", "_localizer_graphs"
_COUNTS, _PROBES = "_localizer_counts", "_localizer_probes"

_CACHE_WAS_EMPTY = compiled.cache_is_empty()

T = TypeVar("T")


def _install(worker: Any) -> None:
    """Tap the model that `worker` has just loaded."""
    layout.check(worker)
    spec = RunSpec.read(os.environ[SPEC_VARIABLE])
    runner = worker.model_runner
    end_with(spec.parent_pid)
    ring = Sink(Ring(spec.rings[worker.rank]), spec.writer_pids[worker.rank])
    device = torch.device(getattr(runner, "device", "cpu"))
    sink: Channel = ring if device.type == "cpu" else _device_sink(ring, device, spec)
    recorder = Recorder(sink)
    if isinstance(sink, DeviceSink):
        sink.hashes = recorder.unkept(spec.payload)
    graphs = None if device.type == "cpu" else _graphs(recorder, device, spec)
    # before the taps, which keep what they wrap
    tallies, placed = probes.install(spec.probes, lambda: recorder.in_step)
    setattr(worker, _PROBES, tallies)
    undo = taps.install(
        recorder,
        runner,
        worker.vllm_config,
        spec.layers,
        spec.sites,
        spec.level,
        graphs,
        spec.digest_split,
    )
    undo.push(placed)
    counting = counts.Counts(recorder, runner)
    counting.guarded(counting.follow)(undo)
    setattr(worker, _COUNTS, (counting, undo))
    found, _ = boundaries(worker.vllm_config, raw_model(runner.model))
    layers = {chosen.name: chosen.layer for chosen in choose(found, spec.layers)}
    after = None
    if spec.kv_contents:
        contents = kvcache.KVContents(sink, runner, layers, recorder.errors)
        after = contents.after
        setattr(worker, _CONTENTS, contents)
    tracer = trace.Tracer(recorder, sink, runner, list(layers))
    steps.follow(steps.Steps(recorder, tracer, after), undo, runner, graphs)
    setattr(worker, _ATTRIBUTE, recorder)
    setattr(worker, _GRAPHS, graphs)


def _device_sink(ring: Sink, device: torch.device, spec: RunSpec) -> DeviceSink:
    """The sink for rows on a device, which hashes them there if that is asked for."""
    hashing = rowdigest.RowDigests(device) if spec.row_digest == DEVICE else None
    return DeviceSink(ring, CudaTransport(device), hashing=hashing)


def _graphs(recorder: Recorder, device: torch.device, spec: RunSpec) -> Graphs:
    """The taps inside of CUDA graphs."""

    def report(sentence: str) -> None:
        print(f"localizer: {sentence}", file=sys.stderr, flush=True)

    return Graphs(
        device,
        torch.cuda.is_current_stream_capturing,
        recorder.knows,
        report,
        lambda: torch.cuda.mem_get_info(device)[0],
        recorder.stack,
        spec.graph_rows,
        spec.graph_memory,
    )


def _arrange() -> None:
    """Make every worker install its taps right after loading; does nothing the second time."""
    worker_class = layout.worker_class()
    load = worker_class.load_model
    if getattr(load, _ATTRIBUTE, False):
        return
    spec = RunSpec.read(os.environ[SPEC_VARIABLE])

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        refusals.check(self, len(spec.rings))
        result = load(self, *args, **kwargs)
        if not hasattr(self, _ATTRIBUTE):
            _install(self)
        return result

    setattr(load_model, _ATTRIBUTE, True)
    worker_class.load_model = load_model
    if spec.weights:
        weights.arrange()


def _recorder(worker: Any) -> Recorder:
    """The recorder of a worker's taps."""
    recorder = getattr(worker, _ATTRIBUTE, None)
    if recorder is None:
        raise layout.refuse(f"{type(worker).__name__} does not load its model by Worker.load_model")
    assert isinstance(recorder, Recorder)
    return recorder


def _tell(recorder: Recorder, what: str, facts: Callable[..., T], *args: Any) -> T | None:
    """`facts(*args)`; where it fails, as on another version's layout, None, and a note: the run goes on."""
    try:
        return facts(*args)
    except Exception as error:
        recorder.errors.append(f"the {what} are missing: {type(error).__name__}: {error}")
        return None


class LocalizerExtension(ChangesWorker):
    """Calls that localizer's program makes in every worker."""

    def localizer_round(self, names: dict[str, str]) -> None:
        """A round begins; `names` maps vLLM's internal request ids to localizer's."""
        recorder = _recorder(self)
        recorder.guarded(recorder.round)(names)
        counting, undo = getattr(self, _COUNTS)
        counting.guarded(counting.follow_builders)(undo)

    def localizer_in_step(self) -> bool:
        """Whether a recorded step is under way, from scheduling to the end of sampling."""
        return _recorder(self).in_step

    def localizer_close(self) -> bool:
        """The run is over: close the ring; return whether recording went well up to here."""
        recorder = _recorder(self)
        recorder.guarded(recorder.close)()
        return not recorder.guarded.broken

    def localizer_finish(self, check: bool) -> dict[str, Any]:
        """Return facts, counts and errors of this worker.

        With `check` what was recorded is checked against itself. Workers compute together for that: it is for
        all of them or none.
        """
        recorder = _recorder(self)
        if check:
            recorder.guarded(recorder.check)()
        worker: Any = self  # vLLM makes its worker class a heir of this one
        spec, runner = RunSpec.read(os.environ[SPEC_VARIABLE]), worker.model_runner
        tallies = getattr(self, _PROBES)
        recorder.errors += filter(None, (tally.complaint() for tally in tallies))
        tell = functools.partial(_tell, recorder)
        graphs: Graphs | None = getattr(self, _GRAPHS, None)
        recorder.errors += graphs.problems if graphs is not None else ()
        return {
            "engine": tell("facts of the engine", facts.engine_facts, worker) or {},
            "config": tell("resolved configuration", resolved.resolved, worker.vllm_config) or {},
            "weights": tell("digests of the weights", weights.weight_facts, runner) if spec.weights else None,
            "compiled": tell(
                "facts of the compiled code", compiled.compile_facts, worker.vllm_config, _CACHE_WAS_EMPTY
            ),
            "kv_contents": getattr(getattr(self, _CONTENTS, None), "layouts", {}),
            "loaded": tell("names of the loaded files", loaded.loaded_facts),
            "hardware": tell("facts of the hardware", loaded.hardware_facts),
            "dummies": recorder.dummies,
            "counts": getattr(self, _COUNTS)[0].totals(),
            "probes": [tally.record() for tally in tallies],
            "taps": recorder.counts() | (graphs.counts() if graphs is not None else {}),
            "errors": recorder.errors,
            **facts.resources(),
        }


_arrange()
