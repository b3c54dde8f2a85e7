#!/usr/bin/env python3
"""Fuzzes the readers of captures, guided by coverage of localizer.store: see docs/fuzzing.md.

.venv/bin/python tests/fuzz/run.py --target captures --runs 10000
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import tempfile
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOUND = HERE.parents[1] / "build" / "fuzz"
TARGETS = ("tensors", "documents", "captures")
SPARE_BYTES = 1 << 30


def limit_memory(spare: int = SPARE_BYTES) -> None:
    """Let this process have `spare` bytes more than it has now; whoever asks for more gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + spare
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Parse, prepare, fuzz; does not return."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--runs", type=int, default=-1, help="inputs to try; -1: until stopped")
    parser.add_argument("--seconds", type=int, default=0, help="stop after so long; 0: never")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; 0: another one each time")
    parser.add_argument("--timeout", type=int, default=25, help="seconds that one input may take")
    parser.add_argument("--found", type=Path, default=FOUND, help="folder for inputs that do harm")
    parser.add_argument("--keep", type=Path, help="folder for inputs that reach new code")
    parser.add_argument("input", nargs="*", type=Path, help="run only these inputs")
    options = parser.parse_args()

    import atheris

    sys.path.insert(0, str(HERE.parent))
    with atheris.instrument_imports(include=["localizer.store"]):
        import localizer.store.verify  # noqa: F401
    from fuzz import targets

    target = targets.TARGETS[options.target]
    warnings.simplefilter("error")  # a warning would be printed beside the sentence
    options.found.mkdir(parents=True, exist_ok=True)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # thousands of small files
    with tempfile.TemporaryDirectory(prefix="localizer-fuzz-", dir=memory) as scratch:

        def use(data: bytes) -> None:
            target.use(data, Path(scratch))

        def mutate(data: bytes, most: int, seed: int) -> bytes:
            try:
                new = target.mutate(data, random.Random(seed), lambda blob, size: atheris.Mutate(blob, size))
            except RecursionError:  # what was deep became too deep for us
                new = atheris.Mutate(data, most)
            return new[:most]

        keep = options.keep or Path(scratch) / "new"
        keep.mkdir(parents=True, exist_ok=True)
        what = [str(path) for path in options.input] or [str(keep), str(HERE / "corpus" / options.target)]
        flags = {
            "runs": options.runs if not options.input else 1,  # -1: without end
            "max_total_time": options.seconds,
            "seed": options.seed,
            "timeout": options.timeout,
            "max_len": target.longest,
            "len_control": 0,
            "rss_limit_mb": 2048,
            "artifact_prefix": f"{options.found}/{options.target}-",
        }
        arguments = [sys.argv[0], *(f"-{name}={value}" for name, value in flags.items()), *what]
        atheris.Setup(arguments, use, custom_mutator=mutate)
        limit_memory()
        atheris.Fuzz()


if __name__ == "__main__":
    main()
