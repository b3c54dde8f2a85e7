"""How the tests run real engines: settings that keep them small."""

from __future__ import annotations

from collections.abc import Callable

from localizer.store.reader import Capture

EAGER = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
COMPILED = {"kv_cache_memory_bytes": 1 << 28}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

Capturing = Callable[..., Capture]


def rows_stand_alone() -> bool:
    """Whether a row's numbers do not depend on how many rows are computed with it.

    On processors with AMX vLLM 0.32.0 takes kernels for small weights that sum in another way for many rows.
    """
    import torch
    from vllm.model_executor.layers.utils import check_cpu_sgl_kernel

    return not check_cpu_sgl_kernel(256, 256, torch.bfloat16)


class Quiet:
    """Progress that nobody watches."""

    def phase(self, text: str) -> None:
        """Say nothing."""

    def advance(self, rounds: int, of: int, steps: int, tokens: int) -> None:
        """Say nothing."""
