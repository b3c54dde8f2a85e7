"""Runs Python where Triton interprets its kernels on the CPU; it has to be told before it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def interpreted(code: str, timeout: float = 240) -> Any:
    """Run code whose last line of output is JSON, in an interpreter of its own."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
