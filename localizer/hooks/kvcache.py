"""Logical contents of the KV cache: digests of a request's keys and values, whatever blocks they lie in.

Layouts, with B blocks of N tokens, H key-value heads and D elements a head:

* `cpu-vec`: vLLM's CPU backend, `[B, H, N, 2 * D]`, of which the first half of a head's memory in a block
  holds keys as `[D, N]`, the second values as `[N, D]`. Seen on vLLM 0.28.0 and 0.32.0.
* `cpu-amx`: likewise, keys as `[N / 16, D / 2, 16, 2]`, values as `[D / 16, N / 2, 16, 2]`: pairs of
  elements, or of tokens, lie together. Seen on vLLM 0.32.0, where keys and values were those of the rows.
* `content`: `[B, H, N, 2 * D]`, each token's key before its value: FlashAttention and Triton. That of
  FlashAttention 3 was seen on vLLM 0.26.0; 0.28.0 and 0.32.0 read it so.
* `kv-first`: `[2, B, N, H, D]`, and `blocks-first`: `[B, 2, N, H, D]`.

A layout that is none of these is named with the reason, and not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from localizer.hooks.guard import Guard
from localizer.hooks.raw import raw_bytes
from localizer.hooks.sink import Channel
from localizer.hooks.tables import DeviceTables, HostTables, Tables
from localizer.wire.spec import UNREAD

Gather = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From a layer's cache and block numbers [n] to keys and values, each [n * N, H, D]."""

CPU_LAYOUTS = {"vec": "cpu-vec", "vec16": "cpu-vec", "amx": "cpu-amx"}
"""vLLM's names of the instruction sets for which its CPU kernels arrange a cache."""

CONTENT = ("FlashAttentionImpl", "TritonAttentionImpl")
"""Implementations whose cache holds a token's key and value side by side."""


class Unread(Exception):
    """The cache of a layer is not read; the text says why."""


@dataclass(frozen=True)
class Place:
    """Where a layer's keys and values lie: how they are gathered, and through which block table."""

    layer: Any
    layout: str
    group: int


class KVContents:
    """Hashes keys and values after each step; `errors` hears of a fault.

    Attributes:
        after: to be called when a step is over, see `localizer.hooks.trace.AfterStep`; a fault ends the
            contents alone.
        layouts: by tapped layer which layout was read, or why none was; filled at the first step.
    """

    def __init__(self, sink: Channel, runner: Any, layers: Mapping[str, Any], errors: list[str]) -> None:
        self._sink, self._runner, self._layers = sink, runner, layers
        self.after = Guard("the KV contents ended", errors)(self._hash)
        self._places: dict[str, Place] = {}
        self.layouts: dict[str, str] = {}

    def _hash(
        self, requests: Sequence[str], ends: Mapping[str, int], device: DeviceTables | None = None
    ) -> None:
        tables = device if device is not None else self._host_tables()
        if not self.layouts:
            self._look(None if tables is None else tables.sizes)
        if tables is None:
            return
        keys: dict[str, list[str]] = {name: [] for name in self._places}
        values: dict[str, list[str]] = {name: [] for name in self._places}
        for row, request in enumerate(requests):
            end = ends[request]
            for name, place in self._places.items():
                cache = cache_of(place.layer)
                blocks = tables.blocks(place.group, row, -(-end // tables.sizes[place.group]))
                key, value = GATHER[place.layout](cache, blocks.to(cache.device))
                keys[name].append(digest(key[:end]))
                values[name].append(digest(value[:end]))
        self._sink.message(type="contents", keys=keys, values=values)

    def _host_tables(self) -> Tables | None:
        """The block tables of a runner that keeps them on the host; None for one that does not."""
        tables = getattr(getattr(self._runner, "input_batch", None), "block_table", None)
        return None if tables is None else HostTables(tables.block_tables)

    def _look(self, sizes: Sequence[int] | None) -> None:
        """Find out how each layer's cache is laid out, and in which group of block tables, of these sizes."""
        if sizes is None:
            self.layouts = dict.fromkeys(
                self._layers, f"{UNREAD}the block tables of this runner are not known"
            )
            return
        groups = {
            name: (number, group.kv_cache_spec)
            for number, group in enumerate(self._runner.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        for name, layer in self._layers.items():
            try:
                number, size = _group(layer, groups.get(name), sizes)
                place = Place(layer, layout_of(layer, size), number)
            except Unread as why:
                self.layouts[name] = f"{UNREAD}{why}"
            else:
                self._places[name], self.layouts[name] = place, place.layout


def _group(layer: Any, group: tuple[int, Any] | None, sizes: Sequence[int]) -> tuple[int, int]:
    """The group of a layer and the block size of its table."""
    shared = getattr(layer, "kv_sharing_target_layer_name", None)
    if shared:
        raise Unread(f"it shares the cache of {shared}")
    if group is None:
        raise Unread("it has no cache group")
    number, spec = group
    if not type(spec).__name__.startswith("FullAttention"):
        raise Unread(f"the cache of a {type(spec).__name__} is not known")
    return number, int(sizes[number])


def cache_of(layer: Any) -> torch.Tensor:
    """The cache of a layer."""
    cache = layer.kv_cache
    while isinstance(cache, (list, tuple)) and len(cache) == 1:
        cache = cache[0]
    if not isinstance(cache, torch.Tensor):
        raise Unread(f"its cache is {type(cache).__name__}")
    return cache


def layout_of(layer: Any, block_size: int) -> str:
    """The name of a layer's layout, a key of `GATHER`.

    Raises:
        Unread: it is none that is known.
    """
    cache, impl = cache_of(layer), getattr(layer, "impl", None)
    kind, shape = type(impl).__name__, list(cache.shape)
    isa = str(getattr(layer, "isa", getattr(impl, "isa", "")))  # of the implementation in 0.28.0
    heads, size = getattr(impl, "num_kv_heads", -1), getattr(impl, "head_size", -1)
    if len(shape) == 4 and shape[1:] == [heads, block_size, 2 * size]:
        if kind == "CPUAttentionBackendImpl" and cache.dtype.is_floating_point and cache.itemsize > 1:
            found = CPU_LAYOUTS.get(isa)
            if found is not None:
                return found
        elif kind in CONTENT:
            return "content"
    elif len(shape) == 5 and shape[2:] == [block_size, heads, size] and 2 in shape[:2]:
        if shape[0] == 2 and shape[1] != 2:
            return "kv-first"
        if shape[1] == 2 and shape[0] != 2:
            return "blocks-first"
    detail = f" for {isa}" if isa else ""
    raise Unread(f"the layout {shape} of {kind}{detail} is not known")


def _halves(cache: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of CPU blocks as they lie in memory, each [n, H, N * D]."""
    count, (heads, size, width) = len(blocks), cache.shape[1:]
    whole = cache[blocks].reshape(count, heads, 2, size * width // 2)
    return whole[:, :, 0], whole[:, :, 1]


def _rows(blocks: torch.Tensor) -> torch.Tensor:
    """From [n, N, H, D] to [n * N, H, D]."""
    return blocks.flatten(0, 1)


def _cpu_vec(cache: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (key, value), (size, width) = _halves(cache, blocks), (cache.shape[2], cache.shape[3] // 2)
    return (
        _rows(key.unflatten(2, (width, size)).permute(0, 3, 1, 2)),
        _rows(value.unflatten(2, (size, width)).permute(0, 2, 1, 3)),
    )


def _cpu_amx(cache: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (key, value), (size, width) = _halves(cache, blocks), (cache.shape[2], cache.shape[3] // 2)
    count, heads = len(blocks), cache.shape[1]
    key = key.unflatten(2, (size // 16, width // 2, 16, 2)).permute(0, 2, 4, 1, 3, 5)
    value = value.unflatten(2, (width // 16, size // 2, 16, 2)).permute(0, 3, 5, 1, 2, 4)
    shape = count * size, heads, width
    return key.reshape(shape), value.reshape(shape)


def _content(cache: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = cache[blocks].transpose(1, 2).chunk(2, dim=-1)
    return _rows(key), _rows(value)


def _kv_first(cache: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _rows(cache[0, blocks]), _rows(cache[1, blocks])


def _blocks_first(cache: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _rows(cache[blocks, 0]), _rows(cache[blocks, 1])


GATHER: dict[str, Gather] = {
    "cpu-vec": _cpu_vec,
    "cpu-amx": _cpu_amx,
    "content": _content,
    "kv-first": _kv_first,
    "blocks-first": _blocks_first,
}


def digest(rows: torch.Tensor) -> str:
    """blake2b of rows in C order, hex."""
    return blake2b(raw_bytes(rows), digest_size=16).hexdigest()
