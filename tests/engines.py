"""How the tests run real engines: settings that keep them small."""

from __future__ import annotations

from collections.abc import Callable

from localizer.store.reader import Capture

EAGER = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
COMPILED = {"kv_cache_memory_bytes": 1 << 28}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

Capturing = Callable[..., Capture]


class Quiet:
    """Progress that nobody watches."""

    def phase(self, text: str) -> None:
        """Say nothing."""

    def advance(self, rounds: int, of: int, steps: int, tokens: int) -> None:
        """Say nothing."""
