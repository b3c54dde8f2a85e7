"""The time of `localize run` against that of the plain vLLM runs it contains.

    .venv/bin/python benchmarks/run_overhead.py --model smollm2 --scratch /tmp/run-overhead

Both sources are overlays; a fault is planted in one, so that the witness pass is made too. A plain run is a
process of its own that builds the same engine and generates the same rounds, with nothing of localizer in it.
Some are made before and some after; their median counts once for every capture of the run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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
    parser.add_argument("--plain", type=int, default=2, help="plain runs before, and again after")
    parser.add_argument("--scratch", type=Path, required=True)
    options = parser.parse_args()
    engine = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 29}
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    overlay = options.scratch.resolve() / "overlay"
    installed = Path(found.origin).parent
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
    seconds = [plain(spec, environment) for _ in range(options.plain)]
    started = time.monotonic()
    command = [sys.executable, "-m", "localizer.cli.main", "run", str(options.scratch / "localize.toml")]
    out = ["--out", str(options.scratch / "captures"), "--fresh", "--format", "json"]
    done = subprocess.run([*command, *out], stdout=subprocess.PIPE, check=False)
    taken = time.monotonic() - started
    assert done.returncode == 1, "the planted fault was not found"
    seconds += [plain(spec, environment) for _ in range(options.plain)]
    steps = json.loads(done.stdout)["steps"]
    median = statistics.median(seconds)
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
                "seconds_by_capture": {step["step"]: round(step["seconds"], 1) for step in steps},
                "plain_seconds": [round(item, 1) for item in seconds],
                "ratio": round(taken / (median * len(steps)), 3),
                "records": str(runs.folders(options.scratch / "captures")[-1].name),
                "localizer": revision.stdout.strip(),
                "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
