"""Speed and memory of `localize diff`: equal digests, payload byte for byte, and captures of any size.

    .venv/bin/python benchmarks/diff_speed.py --scratch /tmp/diff-speed

Captures are synthetic (synthetic.py): in the real format, but written through no engine. Sides are alternated
and medians given. Payload is read once before it is measured, so that all of it is warm. The peak of
anonymous memory is sampled from /proc every 2 ms, and given above that of a process that only imports. Python
keeps bytecode, as it does of an installed package, also where PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import synthetic
from synthetic import Size

from localizer.diff.align import align
from localizer.diff.compare import compare
from localizer.diff.stored import compare_stored
from localizer.store.reader import Capture

ROOT = Path(__file__).parents[1]
MILLION = Size(rows=7813)
"""1,000,064 row x site pairs, in two sets."""

OTHERS = ("cmp", "numpy.array_equal", "torch.equal")
"""What payload is compared with beside localizer: one as processes, two in this process."""

IMPORTS = (
    "import localizer.cli.main, localizer.cli.diff, localizer.diff.stored, localizer.report.text; input()"
)

MEMORY = {
    "small": Size(rows=1024, kept=4),
    "medium": Size(rows=65_536, kept=4),
    "large": Size(rows=390_625, kept=4),
    "100 GB": Size(rows=390_625, kept=32, holes=True),
    "long": Size(rows=1_000_000, layers=2),
    "longer": Size(rows=4_000_000, layers=2),
}
"""Captures whose memory is measured; payload of all of them is holes."""


def main() -> None:
    """Measure, and print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--scratch", type=Path, required=True, help="A folder for captures; emptied at the end."
    )
    parser.add_argument("--gib", type=float, default=4, help="Payload a side, GiB.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--memory", nargs="*", default=list(MEMORY), help="Captures whose memory is measured."
    )
    options = parser.parse_args()
    options.scratch.mkdir(parents=True)
    try:
        report = {
            "command": "python benchmarks/diff_speed.py " + " ".join(sys.argv[1:]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "versions": versions(),
            "repeats": options.repeats,
            "load_before": os.getloadavg()[0],
            "digests": digests(options.scratch, options.repeats),
            "payload": payload(options.scratch, options.gib, options.repeats),
            "memory": {name: memory(options.scratch, MEMORY[name]) for name in options.memory},
            "load_after": os.getloadavg()[0],
        }
    finally:
        shutil.rmtree(options.scratch)
    print(json.dumps(report, indent=1))


def digests(scratch: Path, repeats: int) -> dict[str, Any]:
    """Seconds of whole processes."""
    pair = two(scratch / "digests", MILLION)
    example = [ROOT / "captures" / name for name in ("candidate", "parent")]
    commands = {
        "python": [sys.executable, "-c", ""],
        "import numpy, click": [sys.executable, "-c", "import numpy, click"],
        "localize --help": localize("--help"),
        "localize diff, example pair": localize("diff", *map(str, example)),
        "localize diff, 1 M row x site": localize("diff", *map(str, pair)),
    }
    found = alternate(
        {name: lambda command=command: run(command) for name, command in commands.items()}, repeats
    )
    shutil.rmtree(scratch / "digests")
    return {"pairs": MILLION.rows * len(MILLION.sites), "seconds": found}


def payload(scratch: Path, gib: float, repeats: int) -> dict[str, Any]:
    """Bytes per second, of one side, of comparing the same warm payload files."""
    rows = int(gib * (1 << 30)) // (128 * synthetic.ROW_BYTES)
    size = Size(rows=rows, kept=128)
    one, other = two(scratch / "payload", size)
    files = [(path, other / path.relative_to(one)) for path in sorted(one.glob("rank-0/payload-*"))]
    total = sum(path.stat().st_size for path, _ in files)
    for pair in files:
        for path in pair:
            path.read_bytes()
    captures = Capture(one), Capture(other)
    alignment = align(*captures)
    comparison = compare(*captures, alignment)

    def alone() -> float:
        start = time.perf_counter()
        assert compare_stored(*captures, alignment, comparison).bytes == size.payload_bytes
        return time.perf_counter() - start

    sides: dict[str, Callable[[], float]] = {
        "localize diff --payload": lambda: run(localize("diff", str(one), str(other), "--payload")),
        "its comparison of bytes alone": alone,
        "localize diff": lambda: run(localize("diff", str(one), str(other))),
        "cmp": lambda: sum(run(["cmp", str(path), str(pair)]) for path, pair in files),
        "numpy.array_equal": lambda: inside(files, "numpy"),
        "torch.equal": lambda: inside(files, "torch"),
    }
    seconds = alternate(sides, repeats)
    rate = {name: total / timing["median"] for name, timing in seconds.items() if name != "localize diff"}
    shutil.rmtree(scratch / "payload")
    return {
        "bytes_a_side": total,
        "files_a_side": len(files),
        "seconds": seconds,
        "bytes_per_second": {name: round(value) for name, value in rate.items()},
        "times_as_fast": {
            side: {name: round(rate[side] / rate[name], 2) for name in OTHERS}
            for side in rate
            if side not in OTHERS
        },
    }


def inside(files: list[tuple[Path, Path]], library: str) -> float:
    """Seconds of comparing mapped files in this process, imports not counted."""
    if library == "torch":
        import torch

        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    start = time.perf_counter()
    for pair in files:
        one, other = (
            np.memmap(path, np.uint8, "r")[: path.stat().st_size // 8 * 8].view(np.int64) for path in pair
        )
        if library == "torch":
            assert torch.equal(torch.from_numpy(one), torch.from_numpy(other))
        else:
            assert np.array_equal(one, other)
    return time.perf_counter() - start


def memory(scratch: Path, size: Size) -> dict[str, Any]:
    """Peak anonymous bytes of a diff above the imports, with and without --payload."""
    size = Size(size.rows, size.layers, size.kept, holes=True)
    one, other = two(scratch / "memory", size)
    imports = peak([sys.executable, "-c", IMPORTS], until_input=True)
    found: dict[str, Any] = {
        "rows": size.rows,
        "pairs": size.rows * len(size.sites),
        "digest_bytes_a_side": 16 * size.rows * len(size.sites),
        "payload_bytes_a_side": size.payload_bytes,
        "sets": len(Capture(one).sets),
        "imports": imports,
    }
    runs = {"digests": []} if size.payload_bytes > 16 << 30 else {"digests": [], "payload": ["--payload"]}
    for name, more in runs.items():
        start = time.perf_counter()
        found[name] = peak(localize("diff", str(one), str(other), *more)) - imports
        found[f"{name}_seconds"] = round(time.perf_counter() - start, 2)
    shutil.rmtree(scratch / "memory")
    return found


def two(folder: Path, size: Size) -> tuple[Path, Path]:
    """Two captures of equal content."""
    one, other = (synthetic.write(folder, name, size) for name in ("candidate", "parent"))
    return one, other


def localize(*arguments: str) -> list[str]:
    """The command line of a localize."""
    return [sys.executable, "-m", "localizer", *arguments]


def run(command: list[str]) -> float:
    """Seconds of a whole process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False, env=environment)
    return time.perf_counter() - start


def alternate(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, dict[str, Any]]:
    """Seconds of every side, taken in turns: the median, and all of them."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, measure in sides.items():
            seconds = measure()
            if turn:  # the first is a warm-up
                found[name].append(round(seconds, 4))
    return {name: {"median": statistics.median(all_), "all": all_} for name, all_ in found.items()}


def peak(command: list[str], *, until_input: bool = False) -> int:
    """The most anonymous memory that a process was seen to have, bytes."""
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    status, most, end = Path(f"/proc/{process.pid}/status"), 0, time.monotonic() + 3
    while process.poll() is None:
        found = re.search(r"RssAnon:\s+(\d+)", status.read_text())
        most = max(most, 1024 * int(found[1])) if found else most
        if until_input and time.monotonic() > end:
            process.communicate(b"\n")
        time.sleep(0.002)
    return most


def machine() -> dict[str, Any]:
    """What the machine is."""
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """What was measured, and what beside it."""
    from importlib.metadata import version

    names = ("numpy", "torch", "msgspec", "click", "xxhash")
    cmp = subprocess.run(["cmp", "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    return {"python": platform.python_version(), "cmp": cmp} | {name: version(name) for name in names}


if __name__ == "__main__":
    main()
