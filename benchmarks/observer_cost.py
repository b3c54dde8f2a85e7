"""CPU milliseconds that observing one step costs, of the worker and of the writer process, without an engine.

    .venv/bin/python benchmarks/observer_cost.py --batches 1,8

Stand-ins with the shapes of SmolLM2-135M (30 attention layers, query, key and value as views of one tensor,
bfloat16) are tapped as vLLM is. Steps keep the pace of the real model; between taps memory is read as weights
would be, so that caches are cold. CPU time depends less on what else runs than speed does, but other programs
in the caches raise it: alternate what is to be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from localizer.capture import processes
from localizer.capture.request import BUFFER_MIB, CaptureRequest, prepare
from localizer.hooks import taps
from localizer.hooks.recorder import Recorder
from localizer.hooks.sink import Sink
from localizer.hooks.steps import Steps, follow
from localizer.store import schema
from localizer.wire import ring as rings

LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY = 30, 9, 3, 64, 49152
WEIGHTS = 7 << 20
"""Bytes read before each layer."""

PACE = 0.017
"""Seconds a step."""


class Impl:
    """An attention implementation that computes nothing."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any
    ) -> None:
        """As vLLM's."""


class Layer(torch.nn.Module):
    """An attention layer; `spent` is the CPU time of its calls, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.impl = Impl()
        self.weights = torch.ones(WEIGHTS // 8, dtype=torch.int64)
        self.spent = 0.0

    def forward(self, qkv: torch.Tensor) -> None:
        self.weights.sum()
        rows, split = len(qkv), (HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD)
        query, key, value = (part.view(rows, -1, HEAD) for part in qkv.split(split, 1))
        output = torch.empty(rows, HEADS, HEAD, dtype=qkv.dtype)
        started = time.thread_time()
        self.impl.forward(self, query, key, value, None, None, output=output)
        self.spent += time.thread_time() - started


class Model(torch.nn.Module):
    """The layers, and logits that are always the same."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.qkv = torch.randn(batch, (HEADS + 2 * KV_HEADS) * HEAD).bfloat16()
        self.logits = torch.randn(batch, VOCABULARY).bfloat16()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer(self.qkv)
        return self.qkv[:, : HEADS * HEAD].contiguous()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits


class Runner:
    """Decodes one token of each request a step; `beside` is less by the CPU time of the model."""

    def __init__(self, batch: int) -> None:
        self.model = Model(batch)
        self.input_batch = SimpleNamespace(req_ids=[f"{index}-abc" for index in range(batch)])
        self.position = 0
        self.beside = 0.0

    def execute_model(self, scheduler_output: Any) -> None:
        batch = len(self.input_batch.req_ids)
        ids = torch.ones(batch, dtype=torch.int32)
        places = torch.full((batch,), self.position, dtype=torch.int64)
        started = time.thread_time()
        hidden = self.model(input_ids=ids, positions=places)
        self.beside -= time.thread_time() - started
        self.model.compute_logits(hidden)

    def sample_tokens(self) -> Any:
        names = self.input_batch.req_ids
        return SimpleNamespace(req_ids=names, sampled_token_ids=[[1]] * len(names))

    def step(self) -> float:
        """Seconds of CPU time of one step, without what the model itself reads."""
        names = self.input_batch.req_ids
        before = self.beside + sum(layer.spent for layer in self.model.layers)
        started = time.thread_time()
        self.execute_model(
            SimpleNamespace(
                num_scheduled_tokens=dict.fromkeys(names, 1),
                total_num_scheduled_tokens=len(names),
                scheduled_spec_decode_tokens={},
            )
        )
        self.sample_tokens()
        self.position += 1
        taken = time.thread_time() - started
        return taken + self.beside + sum(layer.spent for layer in self.model.layers) - before


def on_cpu(pid: int) -> float:
    """Seconds of CPU time that a process has had."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def paced(runner: Runner) -> float:
    """A step, and then a rest."""
    until = time.monotonic() + PACE
    spent = runner.step()
    time.sleep(max(0.0, until - time.monotonic()))
    return spent


def measure(batch: int, layers: str, payload: str, steps: int) -> dict[str, Any]:
    """Median CPU milliseconds a step of the worker, and mean ones of the writer."""
    request = CaptureRequest(
        name="cost", root=Path(), model="tiny", matrix=str(batch), repeats=1, max_tokens=steps,
        prompt_tokens=16, layers=layers, payload=payload,
    )  # fmt: skip
    opening = prepare(request).opening
    runner = Runner(batch)
    plain = statistics.median(paced(runner) for _ in range(50))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / schema.OPEN).write_bytes(schema.encode(opening))
        descriptor = rings.create(BUFFER_MIB << 20)
        writer = processes.start_writer(descriptor, Path(folder), 0)
        recorder = Recorder(Sink(rings.Ring(descriptor), writer.pid))
        context = {f"model.layers.{i}.self_attn.attn": layer for i, layer in enumerate(runner.model.layers)}
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
        undo = taps.install(recorder, runner, config, layers)
        follow(Steps(recorder), undo, runner)
        names = dict(zip(runner.input_batch.req_ids, schema.rounds([batch], 1)[0], strict=True))
        recorder.round(names)
        time.sleep(1)
        runner.position = 0
        worker, before = [], on_cpu(writer.pid)
        for _ in range(steps):
            worker.append(paced(runner) - plain)
        time.sleep(0.3)  # the writer has taken everything
        spent = on_cpu(writer.pid) - before
        recorder.finish()
        undo.close()
        assert not recorder.errors, recorder.errors
        output, _ = writer.communicate(b"finish\n")
        result = json.loads(output)
        assert result["event"] == "written", output
        assert not result["complaints"], output
        assert result["expected"] == result["recorded"], output
        os.close(descriptor)
    ms = {"worker_ms": 1000 * statistics.median(worker), "writer_ms": 1000 * spent / steps}
    return {"batch": batch, "layers": layers, "payload": payload} | {k: round(v, 3) for k, v in ms.items()}


def main() -> None:
    """Print one JSON object a line: a batch size and a choice of layers, and what they cost."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for layers, payload in (("first", "first"), ("all", "none"), ("all", "all")):
        for batch in map(int, options.batches.split(",")):
            print(json.dumps(measure(batch, layers, payload, options.steps)), flush=True)


if __name__ == "__main__":
    main()
