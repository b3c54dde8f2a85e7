"""vLLM's resolved configuration as plain data: what arguments, defaults and the platform made of it."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Mapping
from typing import Any

import torch

NOISE = frozenset(
    {
        # drawn anew for every run
        *("instance_id", "engine_id", "compilation_time", "encoder_compilation_time"),
        # addresses and places of one run
        *("data_parallel_master_port", "data_parallel_rpc_port", "_data_parallel_master_port_list"),
        *("data_parallel_master_ip", "master_addr", "master_port", "kv_ip", "kv_port"),
        *("cache_dir", "local_cache_dir", "traced_files"),
        # tables of the running model, not settings
        *("static_forward_context", "static_all_moe_layers", "bs_to_padded_graph_size"),
        # counts of the run
        *("enabled_custom_ops", "disabled_custom_ops", "inductor_passes"),
        # what the observer sets
        *("worker_extension_cls",),
    }
)
"""Fields that differ between runs of one arm, or that are no settings."""

MOST_ITEMS, MOST_VALUES, LONGEST, DEEPEST = 256, 20_000, 1000, 12
"""Largest list or table, most values of a configuration, longest text, deepest nesting; no more is told."""

_SKIP = object()


def resolved(config: Any) -> dict[str, Any]:
    """Every plain value of a `VllmConfig`, nested by section; objects and what is too large are left out."""
    found = _Walk().table(config, 0)
    return found if isinstance(found, dict) else {}


class _Walk:
    """Turns values into plain ones and counts them."""

    def __init__(self) -> None:
        self._left = MOST_VALUES

    def table(self, record: Any, depth: int) -> Any:
        """The fields of a record of vLLM's."""
        names = [field.name for field in dataclasses.fields(record) if self._kept(field.name)]
        values = {name: self.plain(getattr(record, name, None), depth + 1) for name in names}
        return {name: value for name, value in values.items() if value is not _SKIP}

    def plain(self, value: Any, depth: int) -> Any:
        """A value as JSON has it, or `_SKIP`."""
        self._left -= 1
        if self._left < 0 or depth > DEEPEST:
            return _SKIP
        if isinstance(value, enum.Enum):
            return value.name
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return value if -(1 << 63) <= value < 1 << 63 else str(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, (str, os.PathLike)):
            return os.fspath(value)[:LONGEST]
        if isinstance(value, (torch.dtype, torch.device)):
            return str(value).removeprefix("torch.")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.table(value, depth) if type(value).__module__.startswith("vllm.") else _SKIP
        return self._several(value, depth)

    def _several(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping) and len(value) <= MOST_ITEMS:
            items = {str(key): self.plain(item, depth + 1) for key, item in value.items() if self._kept(key)}
            return {key: item for key, item in items.items() if item is not _SKIP}
        if isinstance(value, (list, tuple, set, frozenset)) and len(value) <= MOST_ITEMS:
            several = [self.plain(item, depth + 1) for item in value]
            if _SKIP in several:
                return _SKIP
            return sorted(several, key=str) if isinstance(value, (set, frozenset)) else several
        return _SKIP

    @staticmethod
    def _kept(name: Any) -> bool:
        return name not in NOISE and not str(name).startswith("_")
