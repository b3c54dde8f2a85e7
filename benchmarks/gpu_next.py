"""What was prepared without a GPU, on one: row digests taken there, limits of graph taps, V2's KV contents.

    python3 benchmarks/gpu_next.py --model /tmp/m/m1b --out /tmp/captures
    python3 benchmarks/gpu_next.py --parts overhead --shape /tmp/m/m8b --model /tmp/m/m1b --out /tmp/captures

Each call prints one JSON object, and writes it to `gpu-next-PARTS.json`; a part that fails says why and stops
no other. The parts:

* `digest`: the kernel against its numpy reference on rows of many widths, dtypes and pitches, on single-bit
  flips, and its speed;
* `captures`: with `--row-digest device`, each digest against the reference of the row that a capture of the
  same work kept; two such captures against each other; one against a capture hashed on the host;
* `limits`: `--graph-rows` and `--graph-memory`, and stated against real memory of the taps;
* `kv`: `--kv-contents` and block tables, on V1 and V2;
* `logits`: tokens and the raw logits that vLLM itself returns, with taps and without, in each graph mode;
* `overhead`: milliseconds a step, alternated: rows hashed on the host and on the GPU, and what other graph
  modes cost without a tap (dummy weights in the shape of `--shape`).

Identity and memory of the GPU are told of each capture.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_capture
import gpu_overhead
import numpy as np

from localizer.diff.align import align
from localizer.store.digest import row_digest
from localizer.store.reader import Capture
from localizer.store.schema import Output
from localizer.wire import rowsum

FIRST = ("digest", "captures", "logits", "limits", "kv")
ARMS = ("v2-fa-full", "v1-tr-full")
ALTERNATED = (
    *("plain", "digests", "digests-device", "query-output", "piecewise", "full-alone"),
    *("plain", "digests", "digests-device", "query-output", "breakable", "eager"),
)
LOGITS = [f"{kind}-{mode}" for kind in ("v2-fa", "v1-tr") for mode in ("full", "piecewise", "none", "eager")]
RETURNED = ("--logprobs", "20", "--engine", "logprobs_mode=raw_logits")
FLIPS = 1000


# -- the kernel ---------------------------------------------------------------------------------------------


def digest(device: str = "cuda", flips: int = FLIPS, gib: float = 1.0) -> dict[str, Any]:
    """The kernel on a device against the reference."""
    import torch

    from localizer.hooks.rowdigest import RowDigests

    where = torch.device(device)
    hashing = RowDigests(where)
    hashing.check()

    def hashed(rows: Any) -> np.ndarray:
        target = torch.zeros((len(rows), rowsum.SIZE), dtype=torch.uint8, device=where)
        hashing([rows], [target])
        return target.cpu().numpy()

    def reference(rows: Any) -> np.ndarray:
        plain = torch.empty(rows.shape, dtype=rows.dtype, device=where).copy_(rows)
        return rowsum.digests(plain.view(torch.uint8).reshape(len(rows), -1).cpu().numpy())

    qkv = torch.randn(5, 48, 128, device=where).to(torch.bfloat16)
    cases = {
        "query of a fused projection": qkv[:, :32],
        "value of a fused projection": qkv[:, 40:],
        "heads that are not contiguous": qkv.transpose(1, 2),
        "logits": torch.randn(3, 4096, device=where),
        "positions": torch.arange(9, device=where)[:, None],
        "bytes at odd addresses": torch.arange(77, device=where).to(torch.uint8).view(7, 11)[:, 1:8],
        "float8": torch.randn(4, 96, device=where).to(torch.float8_e4m3fn),
        "zeros": torch.zeros(2, 24, dtype=torch.float16, device=where),
    }
    different = [name for name, rows in cases.items() if not np.array_equal(hashed(rows), reference(rows))]
    size = 64
    row = torch.randint(0, 256, (1, size), dtype=torch.uint8, device=where)
    bits = torch.arange(flips, device=where) % (8 * size)
    flipped = row.repeat(flips, 1)
    places = torch.arange(flips, device=where), bits // 8
    flipped[places] ^= (1 << (bits % 8)).to(torch.uint8)
    found = hashed(torch.cat([row, flipped]))
    unseen = int((found[1:] == found[0]).all(axis=1).sum())
    result = {
        "cases": len(cases), "different": different, "flips": flips, "flips_not_seen": unseen,
        "flips_as_the_reference": bool(np.array_equal(found[1:], reference(flipped))),
    }  # fmt: skip
    if where.type == "cuda":
        result["gb_per_second"] = speed(hashing, int(gib * (1 << 30)))
    return result


def speed(hashing: Any, size: int) -> dict[str, float]:
    """Gigabytes a second of one launch, by the bytes of a row; the best of five."""
    import torch

    found = {}
    for width in (1024, 8192, 513024):
        rows = torch.empty((size // width, width), dtype=torch.uint8, device="cuda")
        target = torch.empty((len(rows), rowsum.SIZE), dtype=torch.uint8, device="cuda")
        best = float("inf")
        for _ in range(6):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            hashing([rows], [target])
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end))
        found[str(width)] = round(len(rows) * width / best / 1e6, 1)
    return found


# -- captures -----------------------------------------------------------------------------------------------


def against_payload(hashed: Capture, kept: Capture) -> dict[str, Any]:
    """The digests of one capture against the reference of the rows that another one kept, row by row."""
    pairs = align(hashed, kept)
    theirs = {site.name: number for number, site in enumerate(hashed.sites)}
    by_site: dict[str, list[int]] = {}
    for name in kept.payload:
        if name not in theirs or hashed.sites[theirs[name]].digest != rowsum.ROWSUM:
            continue
        equal = differ = 0
        for row, other in zip(pairs.candidate.tolist(), pairs.parent.tolist(), strict=True):
            found = kept.row_payload(name, other)
            if found is None or not hashed.table.present[row, theirs[name]]:
                continue
            same = hashed.table.digest[row, theirs[name]].tobytes() == row_digest(
                rowsum.ROWSUM, found.tobytes()
            )
            equal, differ = equal + same, differ + (not same)
        by_site[name] = [equal, differ]
    wrong = {name: counts for name, counts in by_site.items() if counts[1]}
    return {
        "sites": len(by_site),
        "equal": sum(counts[0] for counts in by_site.values()),
        "differ": sum(counts[1] for counts in by_site.values()),
        "wrong": dict(list(wrong.items())[:5]),
    }


def make(name: str, arm: str, options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Make a capture of an arm of `gpu_capture` under another name, with further arguments."""
    command = [*gpu_capture.arguments(arm, options), *more]
    command[1] = name
    started = time.monotonic()
    status, output = gpu_capture.run(command, options.limit)
    found: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
    folder = options.out / name
    newest = gpu_overhead.newest(folder) if folder.exists() else None
    if newest is None or not (newest / "manifest.json").exists():
        return found | {"output": output.splitlines()[-12:]}
    opening = json.loads((newest / "open.json").read_text())
    manifest = json.loads((newest / "manifest.json").read_text())
    return found | {
        "state": manifest["state"], "reasons": manifest["reasons"][:3], "counts": manifest["counts"],
        "stated": opening["observer"]["graph_taps"], "gpus": (manifest["identity"] or {}).get("gpus"),
        "gpu_memory": manifest["gpu_memory"], "kv_contents": sorted(set(manifest["kv_contents"].values())),
    }  # fmt: skip


def opened(options: argparse.Namespace, name: str) -> Capture:
    """The newest capture of a name."""
    return Capture(gpu_overhead.newest(options.out / name))


def returned(options: argparse.Namespace, name: str) -> list[Output]:
    """What vLLM returned in the newest capture of a name."""
    manifest = opened(options, name).manifest
    assert manifest is not None
    return manifest.outputs


def captures(options: argparse.Namespace) -> dict[str, Any]:
    """Rows hashed on the GPU against rows that were kept."""
    device = ("--payload", "none", "--row-digest", "device")
    jobs = [
        (f"next-{arm}-{what}", arm, *more)
        for arm in ARMS
        for what, more in (("kept", ("--payload", "all")), ("device", device), ("again", device))
    ]
    with ThreadPoolExecutor(options.together) as pool:
        made = dict(
            zip(
                [job[0] for job in jobs],
                pool.map(lambda job: make(*job[:2], options, *job[2:]), jobs),
                strict=True,
            )
        )
    found: dict[str, Any] = {"captures": made}
    for arm in ARMS:
        names = [f"next-{arm}-{what}" for what in ("kept", "device", "again")]
        if any(made[name].get("state") != "complete" for name in names):
            continue
        found[arm] = {
            "device_against_kept_rows": against_payload(opened(options, names[1]), opened(options, names[0])),
            "device_against_device": gpu_capture.diff((names[1], names[2]), options),
            "device_against_host": gpu_capture.diff((names[1], names[0]), options),
        }
    return found


def logits(options: argparse.Namespace) -> dict[str, Any]:
    """What vLLM returns with taps and without: tokens, and beside each the raw logits of the first 20."""
    jobs = [(arm, *more) for arm in LOGITS for more in ((), ("--no-taps",))]
    names = [f"next-logits-{arm}{'-plain' if more else ''}" for arm, *more in jobs]
    with ThreadPoolExecutor(options.together) as pool:
        made = list(pool.map(lambda name, job: make(name, job[0], options, *RETURNED, *job[1:]), names, jobs))
    found: dict[str, Any] = {"captures": dict(zip(names, made, strict=True))}
    for arm in LOGITS:
        sides = [f"next-logits-{arm}", f"next-logits-{arm}-plain"]
        if all("state" in found["captures"][side] for side in sides):
            tapped, plain = (returned(options, side) for side in sides)
            found[arm] = {
                "tokens_equal": [one.tokens for one in tapped] == [one.tokens for one in plain],
                "logits_equal": [one.logprobs for one in tapped] == [one.logprobs for one in plain],
                "logits": sum(len(table) for one in tapped for table in one.logprobs),
            }
    return found


def limits(options: argparse.Namespace) -> dict[str, Any]:
    """What is not tapped is missing and said so; what does not fit is refused; what is stated is needed."""
    arm = ARMS[0]
    return {
        "graph_rows_4": make("next-rows", arm, options, "--graph-rows", "4"),
        "graph_memory_1": make("next-memory", arm, options, "--graph-memory", "1"),
        "no_limit": make("next-free", arm, options),
    }


def kv(options: argparse.Namespace) -> dict[str, Any]:
    """KV contents and block tables of both runners, and full against piecewise graphs."""
    arms = ("v2-fa-full", "v2-fa-piecewise", "v1-fa-full")
    with ThreadPoolExecutor(options.together) as pool:
        made = dict(
            zip(
                arms,
                pool.map(lambda arm: make(f"next-kv-{arm}", arm, options, "--kv-contents"), arms),
                strict=True,
            )
        )
    found: dict[str, Any] = {"captures": made}
    steps = {arm: opened(options, f"next-kv-{arm}").steps for arm in arms if "state" in made[arm]}
    for arm, traced in steps.items():
        found[arm] = {
            "steps": len(traced),
            "with_blocks": sum(step.blocks is not None for step in traced),
            "with_contents": sum(bool(step.keys) for step in traced),
        }
    first, *others = steps.items() or [("", [])]
    for arm, traced in others:
        both = zip(first[1], traced, strict=False)
        same = [(one.keys, one.values) == (other.keys, other.values) for one, other in both]
        found[f"{first[0]} and {arm}"] = {"steps_equal": sum(same), "of": len(same)}
    return found


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a step by arm."""
    options.arms, options.model = ",".join(ALTERNATED), options.shape or options.model
    until = time.monotonic() + options.total
    return gpu_overhead.speed(options, "v2", "FLASH_ATTN", until)


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "digest": lambda options: digest(),
    "captures": captures,
    "logits": logits,
    "limits": limits,
    "kv": kv,
    "overhead": overhead,
}


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; with all that `gpu_capture` and `gpu_overhead` ask for."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--parts", default=",".join(FIRST), help="parts, with commas")
    parser.add_argument("--model", required=True)
    parser.add_argument("--shape", default="", help="model folder of the overhead; --model unless named")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--matrix", default="1,8,2")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--limit", type=float, default=150, help="seconds of one capture")
    parser.add_argument("--total", type=float, default=500, help="seconds of everything")
    parser.add_argument("--together", type=int, default=4, help="captures at a time")
    options = parser.parse_args(arguments)
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {min(unknown)!r}; there are {', '.join(PARTS)}")
    return options


def main() -> None:
    """Do the parts one after the other, as long as there is time."""
    options = parsed()
    until = time.monotonic() + options.total
    result: dict[str, Any] = {}
    for part in options.parts.split(","):
        left = until - time.monotonic()
        if left < 60:
            result[part] = {"skipped": "no time left"}
            continue
        options.total, options.limit = left, min(options.limit, left)
        started = time.monotonic()
        try:
            result[part] = PARTS[part](options)
        except Exception as error:  # the other parts are to be done
            result[part] = {
                "failed": f"{type(error).__name__}: {error}",
                "at": traceback.format_exc()[-1500:],
            }
        result[part]["seconds"] = round(time.monotonic() - started, 1)
    options.results.mkdir(parents=True, exist_ok=True)
    name = f"gpu-next-{options.parts.replace(',', '-')}.json"
    (options.results / name).write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
