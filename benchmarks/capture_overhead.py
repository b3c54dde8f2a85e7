"""Generation speed with taps against without, alternated in one process on one engine; medians and ratios.

    .venv/bin/python benchmarks/capture_overhead.py --model tiny

Arms: none (no taps installed), first (first layer, query/key/value/output as payload), all (all layers as
digests, nothing kept). The engine runs in this process; taps are put on for two equal rounds, which are one
capture, and taken away again. Only generation is timed, of the second round: what is due once a capture
(dtype, shape and code of every site are told, memory is mapped) falls into the first, whose ratio stands
beside it. How long the writer then still needs is given as `drain`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from localizer.capture import processes
from localizer.capture.request import BUFFER_MIB, CaptureRequest, prepare
from localizer.store import schema
from localizer.wire import ring as rings

ARMS = {"none": None, "first": ("first", "first"), "all": ("all", "none")}
"""Name -> (layers, payload)."""


class Seconds(NamedTuple):
    """Of one capture: generation of its first round and of its second, and what the writer needed then."""

    first: float
    second: float
    drain: float


class Tapped:
    """An engine whose taps can be put on and taken away."""

    def __init__(self, model: str, engine: dict[str, Any], tokens: int, prompt_tokens: int) -> None:
        from vllm import LLM

        self._request = CaptureRequest(
            name="benchmark",
            root=Path(),
            model=model,
            repeats=2,
            max_tokens=tokens,
            prompt_tokens=prompt_tokens,
            engine=engine,
        )
        path = prepare(self._request).opening.workload.model.path
        self.llm = LLM(model=path, skip_tokenizer_init=True, enable_prefix_caching=False, **engine)
        executor = self.llm.llm_engine.engine_core.engine_core.model_executor
        self.runner = executor.driver_worker.worker.model_runner

    def capture(self, batch: int, arm: str) -> Seconds:
        """Make a capture of two rounds."""
        from dataclasses import replace

        from vllm import SamplingParams

        layers, payload = ARMS[arm] or ("first", "none")
        opening = prepare(replace(self._request, matrix=str(batch), layers=layers, payload=payload)).opening
        sampling = SamplingParams(**opening.workload.sampling)
        with self._taps(opening, layers) if ARMS[arm] else contextlib.nullcontext() as recorder:
            first, seconds = (
                self._generate(opening, names, sampling, recorder) for names in schema.rounds([batch], 2)
            )
            ended = time.perf_counter()
        return Seconds(first, seconds, time.perf_counter() - ended)

    def _generate(self, opening: schema.Open, names: list[str], sampling: Any, recorder: Any) -> float:
        """Seconds of the generation of one round of a capture."""
        self.llm.sleep(level=0, mode="keep")
        prompts = [{"prompt_token_ids": prompt} for prompt in opening.workload.prompts]
        internal = self.llm.enqueue(prompts, sampling, use_tqdm=False)
        if recorder is not None:
            recorder.round(dict(zip(internal, names, strict=True)))
        self.llm.wake_up()
        started = time.perf_counter()
        self.llm.wait_for_completion(use_tqdm=False)
        return time.perf_counter() - started

    @contextlib.contextmanager
    def _taps(self, opening: schema.Open, layers: str) -> Iterator[Any]:
        import localizer.hooks.steps as steps
        import localizer.hooks.taps as taps
        from localizer.hooks.recorder import Recorder
        from localizer.hooks.sink import Sink

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / schema.OPEN).write_bytes(schema.encode(opening))
            descriptor = rings.create(BUFFER_MIB << 20)
            writer = processes.start_writer(descriptor, Path(folder), 0)
            recorder = Recorder(Sink(rings.Ring(descriptor), writer.pid))
            config = self.llm.llm_engine.vllm_config
            with taps.install(recorder, self.runner, config, layers) as undo:
                steps.follow(steps.Steps(recorder), undo, self.runner)
                time.sleep(0.7)  # the writer has started and waits
                yield recorder
            recorder.finish()
            assert not recorder.errors, recorder.errors
            output, _ = writer.communicate(b"finish\n")
            assert json.loads(output)["event"] == "written", output
            os.close(descriptor)


def main() -> None:
    """Print one JSON object: for each batch size and arm the median seconds, and the speed kept."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--engine", default='{"enforce_eager": true, "kv_cache_memory_bytes": 536870912}')
    options = parser.parse_args()
    engine = Tapped(options.model, json.loads(options.engine), options.tokens, options.prompt_tokens)
    batches = [int(batch) for batch in options.batches.split(",")]
    seconds: dict[tuple[int, str], list[Seconds]] = {(batch, arm): [] for batch in batches for arm in ARMS}
    for batch in batches:
        engine.capture(batch, "none")  # warm
    for repeat in range(options.repeats):
        for batch in batches:
            arms = list(ARMS)
            for arm in arms[repeat % len(arms) :] + arms[: repeat % len(arms)]:
                seconds[batch, arm].append(engine.capture(batch, arm))
    print(json.dumps(report(options, batches, seconds), indent=1))


def report(
    options: argparse.Namespace,
    batches: list[int],
    seconds: dict[tuple[int, str], list[Seconds]],
) -> dict[str, Any]:
    """Medians, the speed kept (median untapped / median tapped), and per-repeat ratios' quartiles."""
    import torch
    import vllm

    command = ["git", "rev-parse", "--short", "HEAD"]
    revision = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    rows = []
    for batch in batches:
        plain_first, plain, _ = zip(*seconds[batch, "none"], strict=True)
        for arm in ARMS:
            first, taken, drain = zip(*seconds[batch, arm], strict=True)
            median = statistics.median(taken)
            ratios = [base / other for base, other in zip(plain, taken, strict=True)]
            rows.append(
                {
                    "batch": batch,
                    "taps": arm,
                    "median_ms_per_step": round(1000 * median / options.tokens, 3),
                    "speed_kept": round(statistics.median(plain) / median, 3),
                    "speed_kept_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)],
                    "speed_kept_in_the_first_round": round(
                        statistics.median(plain_first) / statistics.median(first), 3
                    ),
                    "median_drain_s": round(statistics.median(drain), 3),
                }
            )
    return {
        "what": "generation with taps against without, alternated in one process",
        "model": options.model,
        "engine": json.loads(options.engine),
        "repeats": options.repeats,
        "tokens": options.tokens,
        "versions": {"localizer": revision, "vllm": vllm.__version__, "torch": torch.__version__},
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "results": rows,
    }


if __name__ == "__main__":
    main()
