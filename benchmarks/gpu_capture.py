"""Captures on a GPU in each mode of vLLM's engine, diffs between them, and tokens with taps against without.

    python3 benchmarks/gpu_capture.py --model /tmp/m/m1b --draft /tmp/m/draft1b --out /tmp/captures

Captures run a few at a time, each in a process group of its own with a time limit; what fails stops nothing
else. All sides of a diff run the same workload. Nothing is forced but what an arm is named after: model
runner (v1, v2), attention backend (tr: TRITON_ATTN, fa: FLASH_ATTN), graph mode (full: FULL_AND_PIECEWISE,
the default; alone: FULL; breakable: the default with graphs that Python can break), `eagle`: EAGLE3 with
three draft tokens, `core`: the engine core in its own process, `sync`: async scheduling off, `plain`: no
taps. The summary is printed at the end and written to `summary.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

MODES = {"full": "FULL_AND_PIECEWISE", "piecewise": "PIECEWISE", "none": "NONE", "alone": "FULL"}
BACKENDS = {"tr": "TRITON_ATTN", "fa": "FLASH_ATTN"}

FIRST = (
    *(
        "v2-fa-full",
        "v2-fa-piecewise",
        "v1-tr-full",
        "v1-tr-piecewise",
        "v2-fa-full-plain",
        "v1-tr-full-plain",
    ),
    *("v2-fa-none", "v1-tr-none", "v2-tr-full", "v2-tr-piecewise", "v1-fa-full", "v1-fa-piecewise"),
    *("v2-fa-full-eagle", "v2-fa-piecewise-eagle", "v1-tr-full-eagle", "v1-tr-piecewise-eagle"),
    *("v2-fa-full-core", "v2-fa-full-sync", "v2-fa-eager", "v1-tr-eager", "v2-fa-eager-plain"),
    *("v1-tr-eager-plain", "v2-tr-none", "v1-fa-none", "v2-tr-eager", "v1-fa-eager"),
    *("v2-fa-piecewise-plain", "v1-tr-piecewise-plain"),
    *("v1-fa-full-eagle", "v1-fa-piecewise-eagle", "v2-tr-full-eagle", "v2-tr-piecewise-eagle"),
    *("v2-fa-alone", "v1-tr-alone", "v2-fa-breakable", "v1-tr-breakable"),
    *("v2-fa-alone-plain", "v1-tr-alone-plain", "v2-fa-breakable-plain", "v1-tr-breakable-plain"),
)
"""Arms in the order in which they start: what teaches most comes first."""

ALONE = (
    *("v1-fa-full-profiled", "v1-fa-full-profiled-plain"),
    *("v2-fa-full-profiled", "v2-fa-full-profiled-plain"),
)
"""Arms whose KV cache is sized by vLLM's own profiling, which others would disturb: one after the other."""

PAIRS = (
    ("v2-fa-full", "v2-fa-piecewise"), ("v2-fa-full", "v2-fa-none"), ("v1-tr-full", "v1-tr-piecewise"),
    ("v1-tr-full", "v1-tr-none"), ("v2-tr-full", "v2-tr-piecewise"), ("v2-tr-full", "v2-tr-none"),
    ("v1-fa-full", "v1-fa-piecewise"), ("v1-fa-full", "v1-fa-none"), ("v1-fa-full", "v2-fa-full"),
    ("v1-tr-full", "v2-tr-full"), ("v2-fa-full", "v2-fa-full-core"), ("v2-fa-full", "v2-fa-full-sync"),
    ("v2-fa-full-eagle", "v2-fa-piecewise-eagle"), ("v1-tr-full-eagle", "v1-tr-piecewise-eagle"),
    ("v1-fa-full-eagle", "v1-fa-piecewise-eagle"), ("v2-tr-full-eagle", "v2-tr-piecewise-eagle"),
    ("v2-fa-full", "v2-fa-alone"), ("v1-tr-full", "v1-tr-alone"), ("v2-fa-breakable", "v2-fa-eager"),
    ("v1-tr-breakable", "v1-tr-eager"), ("v1-fa-eager", "v2-fa-eager"), ("v1-tr-eager", "v2-tr-eager"),
    ("v2-fa-full", "v2-fa-eager"),
)  # fmt: skip
"""Arms that are compared; all but the last should be identical, row for row."""


def arguments(arm: str, options: argparse.Namespace) -> list[str]:
    """The command line of `localize capture` for an arm."""
    runner, backend, mode, *more = arm.split("-")
    engine: dict[str, Any] = {
        "gpu_memory_utilization": 0.2,
        "max_model_len": 2048,
        "attention_backend": BACKENDS[backend],
    }
    if "profiled" not in more:
        engine["kv_cache_memory_bytes"] = 4 << 30
    if mode == "eager":
        engine["enforce_eager"] = True
    elif mode in MODES:
        engine["compilation_config"] = {"cudagraph_mode": MODES[mode]}
    if "sync" in more:
        engine["async_scheduling"] = False
    command = ["capture", arm, "--model", options.model, "--out", str(options.out), "--no-weight-digests"]
    command += ["--matrix", options.matrix, "--repeats", "1", "--max-tokens", str(options.max_tokens)]
    command += ["--env", f"VLLM_USE_V2_MODEL_RUNNER={int(runner == 'v2')}"]
    command += ["--env", f"VLLM_ENABLE_V1_MULTIPROCESSING={int('core' in more)}"]
    if mode == "breakable":
        command += ["--env", "VLLM_USE_BREAKABLE_CUDAGRAPH=1"]
    for key, value in engine.items():
        command += ["--engine", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    if "eagle" in more:
        command += ["--speculative-model", options.draft, "--speculative", "method=eagle3"]
    return [*command, "--no-taps"] if "plain" in more else command


def run(command: list[str], seconds: float) -> tuple[int, str]:
    """Exit status and output of one localizer command, which ends with all it started after `seconds`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "localizer.cli.main", *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # localize stops its source, keeps what there is, and says so
        try:
            output, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        output += f"\n(stopped after {seconds:.0f} s)"
    return process.returncode, output


def capture(arm: str, options: argparse.Namespace, until: float) -> dict[str, Any]:
    """Make one capture; what came of it."""
    left = min(options.limit, until - time.monotonic())
    if left < 45:
        return {"arm": arm, "skipped": "no time left"}
    started = time.monotonic()
    status, output = run(arguments(arm, options), left)
    found: dict[str, Any] = {"arm": arm, "status": status, "seconds": round(time.monotonic() - started, 1)}
    folder = options.out / arm / "0001"
    log = (folder / "log.txt").read_text(errors="replace") if (folder / "log.txt").exists() else ""
    stated = [line.partition("localizer: ") for line in log.splitlines()]
    found["stated"] = [text for _, mark, text in stated if mark and " bytes on " in text]
    if (folder / "manifest.json").exists():
        manifest = json.loads((folder / "manifest.json").read_text())
        engine = manifest["engine"]
        backends = engine.get("attention_backends", {})
        found |= {
            "state": manifest["state"], "reasons": manifest["reasons"], "counts": manifest["counts"],
            "durations": manifest["durations"], "untapped": manifest["untapped"],
            "runner": engine.get("runner", ""), "mode": engine.get("cudagraph_mode"),
            "kv_blocks": engine.get("num_kv_blocks"), "async": engine.get("async_scheduling"),
            "backends": sorted({name.rpartition(".")[2] for name in backends.values()}),
            "sites": len(manifest["sites"]), "graph_modes": graph_modes(folder),
            "tokens": [output["tokens"] for output in manifest["outputs"]],
        }  # fmt: skip
    if found.get("state") != "complete":
        found["output"], found["log"] = output.splitlines()[-30:], log.splitlines()[-30:]
        found["errors"] = [line for line in log.splitlines() if re.search(r"\w(Error|Exception)\b", line)][:6]
    return found


def graph_modes(folder: Path) -> dict[str, int]:
    """How many steps ran in which CUDA graph mode, by the schedule trace."""
    from localizer.store.reader import Capture

    counts: dict[str, int] = {}
    try:
        for step in Capture(folder).steps:
            counts[step.graph] = counts.get(step.graph, 0) + 1
    except Exception as error:  # an untapped capture has no trace
        counts[f"{type(error).__name__}: {error}"[:80]] = 0
    return counts


def diff(pair: tuple[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Compare two captures."""
    status, output = run(["diff", *pair, "--out", str(options.out), "--format", "json"], 60)
    found: dict[str, Any] = {"pair": list(pair), "status": status}
    try:
        result = json.loads(output)
    except ValueError:
        return found | {"output": output.splitlines()[-8:]}
    compared = sum(site["rows_compared"] for site in result["sites"])
    differ = [site["site"] for site in result["sites"] if site["rows_differ"]]
    return found | {
        "verdict": result["verdict"], "reasons": result["reasons"], "first": result["first"],
        "cells_compared": compared, "sites_that_differ": len(differ), "tokens": result["tokens"],
    }  # fmt: skip


def show(summary: dict[str, Any]) -> None:
    """Print what came out, failures at length."""
    captures = summary["captures"]
    for found in captures.values():
        if found.get("state") == "complete":
            continue
        print(f"\n=== {found['arm']}: {found.get('state', 'no manifest')}, status {found.get('status')}")
        for part in ("skipped", "reasons", "errors", "stated", "output", "log"):
            value = found.get(part, [])
            for line in value if isinstance(value, list) else [value]:
                print(f"  {part}: {line[:400]}")
    print("\narm                       state       s    rows@host in-graph sites blocks async  modes; stated")
    for found in captures.values():
        counts = found.get("counts", {})
        columns = [
            f"{found['arm']:25s} {found.get('state', '-'):10s} {found.get('seconds', 0):5.0f}",
            f"{counts.get('rows_at_host', 0):9d} {counts.get('rows_in_graph', 0):8d}",
            f"{found.get('sites', 0):5d} {found.get('kv_blocks')!s:>6s} {found.get('async')!s:6s}",
            f"{found.get('graph_modes')} {found.get('mode')} {found.get('backends')}",
            found.get("runner", "").rpartition(".")[0][-24:],
            *(line[:90] for line in found.get("stated", [])),
        ]
        print(" ".join(columns))
    print("\ndiffs")
    for found in summary["diffs"]:
        first = found.get("first") or {}
        where = f"first {first.get('request')}@{first.get('position')} {first.get('site')}" if first else ""
        print(
            f"  {found['pair'][0]} / {found['pair'][1]}: {found.get('verdict', found.get('output'))} "
            f"{found.get('cells_compared', '')} cells, {found.get('sites_that_differ', '')} sites differ "
            f"{where} {found.get('reasons', '')!s:.300}"
        )
    print("\ntokens and KV blocks with taps against without")
    for line in summary["plain"]:
        print(f"  {line}")


def plain(captures: dict[str, dict[str, Any]]) -> list[str]:
    """Whether tokens and KV blocks are the same with taps and without."""
    lines = []
    for arm in captures:
        if not arm.endswith("-plain"):
            continue
        tapped, bare = captures.get(arm.removesuffix("-plain"), {}), captures[arm]
        if "tokens" in tapped and "tokens" in bare:
            same = "equal" if tapped["tokens"] == bare["tokens"] else "DIFFERENT"
            lines.append(f"{arm}: tokens {same}, KV blocks {tapped['kv_blocks']} and {bare['kv_blocks']}")
        else:
            lines.append(f"{arm}: one side is missing")
    return lines


def main() -> None:
    """Make the captures, compare them, say what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--arms", default="", help="arms, with commas; all of them unless named")
    parser.add_argument("--matrix", default="1,2,4,8")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--limit", type=float, default=150, help="seconds of one capture")
    parser.add_argument("--total", type=float, default=480, help="seconds of everything")
    parser.add_argument("--together", type=int, default=6, help="captures at a time")
    options = parser.parse_args()
    until = time.monotonic() + options.total
    chosen = options.arms.split(",") if options.arms else [*FIRST, *ALONE]
    together = [arm for arm in chosen if "profiled" not in arm]
    captures: dict[str, dict[str, Any]] = {}
    reserve = 100.0 if len(together) < len(chosen) else 20.0
    with ThreadPoolExecutor(options.together) as pool:
        jobs: list[Future[dict[str, Any]]] = [
            pool.submit(capture, arm, options, until - reserve) for arm in together
        ]
        for arm, job in zip(together, jobs, strict=True):
            captures[arm] = job.result()
            print(arm, captures[arm].get("state"), captures[arm].get("seconds"), flush=True)
    for arm in chosen:
        if arm not in captures:
            captures[arm] = capture(arm, options, until - 15)
            print(arm, captures[arm].get("state"), captures[arm].get("seconds"), flush=True)
    there = {arm for arm, found in captures.items() if "state" in found}
    with ThreadPoolExecutor(4) as pool:
        diffs = list(pool.map(lambda pair: diff(pair, options), [p for p in PAIRS if there.issuperset(p)]))
    summary = {
        "python": platform.python_version(), "matrix": options.matrix, "max_tokens": options.max_tokens,
        "captures": captures, "diffs": diffs, "plain": plain(captures),
    }  # fmt: skip
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "summary.json").write_text(json.dumps(summary, indent=1))
    for arm, found in captures.items():
        log = options.out / arm / "0001" / "log.txt"
        if found.get("state") != "complete" and log.exists():
            (options.results / f"log-{arm}.txt").write_bytes(log.read_bytes()[-200_000:])
    show(summary)


if __name__ == "__main__":
    main()
