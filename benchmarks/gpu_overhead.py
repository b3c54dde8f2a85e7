"""What capturing costs on a GPU: milliseconds a step with taps and without, by mode; and a planted fault.

    python3 benchmarks/gpu_overhead.py --model /tmp/m/m8b --small /tmp/m/m1b --out /tmp/captures

Arms are captures by the command line, one process each, alternated; weights are dummies of the model's shape.
A round's milliseconds a step are its seconds, first step to last output, over its new tokens; rounds of each
batch size give p10, p50 and p90. `plain` has no taps; `digests` taps all sites of all layers, logits too, and
keeps digests, `digests-device` has them from the GPU; `query-output` those of all layers, as digests, or
`-kept` as rows. Without a tap, `eager` and `piecewise` are what forcing these modes in order to observe would
cost, `full-alone` and `breakable` (graphs that Python can break) what other modes do. The first round of each
size in a process is left out.

The fault is one line in one layer of the small model, in an overlay, under full graphs: the diff has to
name it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from localizer.sources import fault

SIZES = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
"""Few graphs, so that an engine starts sooner; the mode stays vLLM's default."""

QUERY_OUTPUT = ["--sites", "*/query", "--sites", "*/output"]
TAPS = {
    "plain": ["--no-taps"],
    "digests": ["--payload", "none"],
    "digests-device": ["--payload", "none", "--row-digest", "device"],
    "query-output": ["--payload", "none", *QUERY_OUTPUT],
    "query-output-kept": ["--payload", "all", *QUERY_OUTPUT],
    "eager": ["--no-taps", "--engine", "enforce_eager=true"],
    "piecewise": ["--no-taps"],
    "full-alone": ["--no-taps"],
    "breakable": ["--no-taps", "--env", "VLLM_USE_BREAKABLE_CUDAGRAPH=1"],
}
MODES = {"piecewise": "PIECEWISE", "full-alone": "FULL"}
"""Graph modes of arms that do not have vLLM's default."""

ORDER = (
    "plain",
    "query-output",
    "digests",
    "query-output-kept",
    "plain",
    "query-output",
    "piecewise",
    "eager",
)
FAULTY_LAYER = 7


def localize(arguments: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command of localizer; a time limit ends it with status 124."""
    command = ["timeout", "-k", "20", str(seconds), sys.executable, "-m", "localizer.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def settings(options: argparse.Namespace, runner: str, backend: str) -> list[str]:
    """What all captures have in common."""
    engine = {"gpu_memory_utilization": 0.5, "max_model_len": 1024, "attention_backend": backend,
              "kv_cache_memory_bytes": 8 << 30, "enable_prefix_caching": False}  # fmt: skip
    found = ["--out", str(options.out), "--repeats", "1", "--no-weight-digests"]
    found += ["--env", f"VLLM_USE_V2_MODEL_RUNNER={int(runner == 'v2')}"]
    found += ["--env", "VLLM_ENABLE_V1_MULTIPROCESSING=0"]
    for key, value in engine.items():
        found += ["--engine", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return found


def milliseconds(options: argparse.Namespace, name: str) -> dict[int, list[float]]:
    """By batch size, of each round but the first of its size."""
    manifest = json.loads((newest(options.out / name) / "manifest.json").read_text())
    assert manifest["state"] == "complete", manifest["reasons"]
    found: dict[int, list[float]] = {}
    for size, seconds in zip(matrix(options), manifest["round_seconds"], strict=True):
        found.setdefault(size, []).append(1000 * seconds / options.tokens)
    return {size: values[1:] for size, values in found.items()}


def newest(folder: Path) -> Path:
    """The last capture of a name."""
    return max(folder.iterdir(), key=lambda path: int(path.name))


def matrix(options: argparse.Namespace) -> list[int]:
    """Batch sizes, alternated."""
    return [int(size) for size in options.batches.split(",")] * options.rounds


def speed(options: argparse.Namespace, runner: str, backend: str, until: float) -> dict[str, Any]:
    """Capture in the order of `ORDER`; quantiles by arm and batch size."""
    values: dict[tuple[str, int], list[float]] = {}
    failures = []
    for arm in options.arms.split(",") if options.arms else ORDER:
        if time.monotonic() > until - 40:
            failures.append(f"{arm}: no time left")
            continue
        name = f"{runner}-{arm}"
        arguments = ["capture", name, "--model", options.model, *settings(options, runner, backend)]
        arguments += ["--matrix", ",".join(map(str, matrix(options))), "--max-tokens", str(options.tokens)]
        mode = {"cudagraph_mode": MODES[arm]} if arm in MODES else {}
        arguments += ["--engine", f"compilation_config={json.dumps(SIZES | mode)}"]
        arguments += ["--engine", "load_format=dummy", *TAPS[arm]]
        started = time.monotonic()
        done = localize(arguments, min(options.limit, until - time.monotonic()))
        print(name, done.returncode, f"{time.monotonic() - started:.0f} s", flush=True)
        try:
            for size, found in milliseconds(options, name).items():
                values.setdefault((arm, size), []).extend(found)
        except (OSError, ValueError, AssertionError) as error:
            failures.append(f"{arm}: {error!s:.300} {done.stdout[-500:]} {done.stderr[-800:]}")
    rows = []
    for (arm, size), found in sorted(values.items(), key=lambda item: item[0][1]):
        tenths = statistics.quantiles(found, n=10)
        plain = values.get(("plain", size))
        kept = None if plain is None else round(statistics.median(plain) / statistics.median(found), 3)
        rows.append(
            {"arm": arm, "batch": size, "rounds": len(found), "p10": round(tenths[0], 3),
             "p50": round(statistics.median(found), 3), "p90": round(tenths[-1], 3), "speed_kept": kept}
        )  # fmt: skip
    return {"runner": runner, "backend": backend, "rows": rows, "failures": failures}


def planted(options: argparse.Namespace, runner: str, backend: str) -> dict[str, Any]:
    """Capture the small model as it is and with a fault in one layer; what the diff names."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    overlay = options.out / "overlay"
    fault.plant(overlay, Path(found.origin).parent, fault.in_layer(FAULTY_LAYER))
    common = ["--model", options.small, *settings(options, runner, backend)]
    common += ["--matrix", "1,4", "--max-tokens", "16", "--payload", "all"]
    said = []
    for name, more in (("right", []), ("faulty", ["--overlay", str(overlay)])):
        done = localize(["capture", f"{runner}-{name}", *common, *more], options.limit)
        said.append(f"{done.returncode} {done.stdout[-300:]} {done.stderr[-300:] if done.returncode else ''}")
    diff = ["diff", f"{runner}-faulty", f"{runner}-right", "--out", str(options.out), "--format", "json"]
    try:
        result = json.loads(localize(diff, 60).stdout)
    except ValueError:
        return {"runner": runner, "captures": said}
    first = result["first"] or {}
    keys = ("request", "position", "kind", "site", "segment", "class", "elements_differ", "max_ulp")
    return {"runner": runner, "planted": f"after the MLP of layer {FAULTY_LAYER}", "captures": said,
            "verdict": result["verdict"], "first": {key: first.get(key) for key in keys}}  # fmt: skip


def main() -> None:
    """Print one JSON object, and write it beside the logs of what failed."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", required=True)
    parser.add_argument("--small", default="", help="a model for the planted fault; none unless named")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--runners", default="v2:FLASH_ATTN,v1:TRITON_ATTN")
    parser.add_argument(
        "--arms", default="", help="arms in their order, with commas; all of them unless named"
    )
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--limit", type=float, default=150, help="seconds of one capture")
    parser.add_argument("--total", type=float, default=480, help="seconds of everything")
    options = parser.parse_args()
    began, runners = time.monotonic(), [item.split(":") for item in options.runners.split(",")]
    result: dict[str, Any] = {
        "faults": [planted(options, *runner) for runner in runners] if options.small else [],
        "speed": [],
        "tokens": options.tokens,
        "model": options.model,
    }
    print(json.dumps(result["faults"], indent=1), flush=True)
    for number, runner in enumerate(runners, 1):
        left = began + options.total - time.monotonic()
        until = time.monotonic() + left / (len(runners) - number + 1)
        result["speed"].append(speed(options, runner[0], runner[1], until))
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "overhead.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result["speed"], indent=1))


if __name__ == "__main__":
    main()
