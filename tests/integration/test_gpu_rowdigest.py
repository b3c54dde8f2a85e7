"""On a GPU: rows are hashed there as the reference hashes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]


def test_the_kernel_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import gpu_next

    found = gpu_next.digest("cuda", gib=0.1)
    assert (found["different"], found["flips_not_seen"], found["flips_as_the_reference"]) == ([], 0, True)
    for name in ("gpu_next", "gpu_capture", "gpu_overhead"):
        sys.modules.pop(name, None)
