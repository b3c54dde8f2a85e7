"""Installing with pip, in tests that are skipped where it reaches no package index."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

UNREACHABLE = ("No matching distribution", "Could not find a version", "Connection", "Temporary failure")
"""What pip says where there is no package index, or none that has the package."""


def install(
    python: str | Path, arguments: Sequence[str | Path], environment: Mapping[str, str] | None = None
) -> None:
    """Call pip install of an interpreter; skip the test where pip cannot fetch what it is asked for."""
    command = [python, "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and any(reason in done.stderr for reason in UNREACHABLE):
        pytest.skip(f"pip cannot fetch what is needed: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
