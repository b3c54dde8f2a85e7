"""Keys and values are found in every known layout, whatever blocks they lie in; another layout is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from localizer.hooks.kvcache import GATHER, KVContents, digest, layout_of  # noqa: E402 - needs torch
from localizer.hooks.tables import DeviceTables  # noqa: E402

BLOCKS, HEADS, SIZE, WIDTH = 6, 2, 32, 64
ORDER = [4, 1, 3]
"""Blocks of a request."""

END = 70


def rows(seed: int) -> Any:
    """Keys or values of a request, [END, HEADS, WIDTH]."""
    return torch.randn(END, HEADS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def slots(order: list[int]) -> Any:
    return torch.tensor([order[position // SIZE] * SIZE + position % SIZE for position in range(END)])


def filled(layout: str, order: list[int]) -> tuple[Any, str, Any]:
    """A cache that holds the request, written as each backend does: (cache, implementation, isa)."""
    key, value, where = rows(1), rows(2), slots(order)
    block, place = where // SIZE, where % SIZE
    if layout.startswith("cpu"):
        ops = pytest.importorskip("vllm._custom_ops")
        isa = layout.removeprefix("cpu-")
        if isa == "amx" and not torch.cpu._is_amx_tile_supported():
            pytest.skip("this processor has no AMX")
        cache = torch.zeros(BLOCKS, HEADS, SIZE, 2 * WIDTH, dtype=torch.bfloat16)
        halves = cache.view(BLOCKS, HEADS, 2 * SIZE, WIDTH).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            key, value, *halves, where, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )
        return cache, "CPUAttentionBackendImpl", isa
    if layout == "content":
        cache = torch.zeros(BLOCKS, HEADS, SIZE, 2 * WIDTH, dtype=torch.bfloat16)
        cache[block, :, place] = torch.cat([key, value], dim=-1)
        return cache, "FlashAttentionImpl", None
    cache = torch.zeros(2, BLOCKS, SIZE, HEADS, WIDTH, dtype=torch.bfloat16)
    cache[0, block, place], cache[1, block, place] = key, value
    return (cache if layout == "kv-first" else cache.transpose(0, 1)), "OtherImpl", None


def layer(cache: Any, kind: str, isa: str | None = None) -> Any:
    impl = type(kind, (), {"num_kv_heads": HEADS, "head_size": WIDTH})()
    found = SimpleNamespace(kv_cache=cache, impl=impl)
    if isa is not None:
        found.isa = isa
    return found


LAYOUTS = ["cpu-vec", "cpu-vec16", "cpu-amx", "content", "kv-first", "blocks-first"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_found(layout: str) -> None:
    cache, kind, isa = filled(layout, ORDER)
    name = layout_of(layer(cache, kind, isa), SIZE)
    assert name == layout.replace("vec16", "vec")
    key, value = GATHER[name](cache, torch.tensor(ORDER))
    assert torch.equal(key[:END], rows(1))
    assert torch.equal(value[:END], rows(2))


def test_a_cache_of_one_engine_in_a_list() -> None:
    cache, kind, _ = filled("content", ORDER)
    assert layout_of(layer([cache], kind), SIZE) == "content"


class Notes:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.errors: list[str] = []

    def message(self, **content: Any) -> None:
        self.messages.append(content)


class FullAttentionSpec:
    pass


class SlidingWindowSpec:
    pass


def contents(orders: list[list[int]], layers: dict[str, Any], spec: type = FullAttentionSpec) -> Any:
    table = SimpleNamespace(block_size=SIZE, get_numpy_array=lambda: np.array(orders, np.int32))
    group = SimpleNamespace(kv_cache_spec=spec(), layer_names=list(layers))
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        input_batch=SimpleNamespace(block_table=SimpleNamespace(block_tables=[table])),
    )
    notes = Notes()
    found = KVContents(notes, runner, layers, notes.errors)  # type: ignore[arg-type]
    found.after(["a"], {"a": END})
    return found, notes.messages[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_physical_blocks_do_not_matter(layout: str) -> None:
    told = []
    for order in (ORDER, [0, 5, 2]):
        cache, kind, isa = filled(layout, order)
        found, message = contents([order], {"l": layer(cache, kind, isa)})
        assert found.layouts == {"l": layout.replace("vec16", "vec")}
        told.append(message)
    assert told[0] == told[1]
    assert told[0] == {
        **{"type": "contents", "keys": {"l": [digest(rows(1))]}, "values": {"l": [digest(rows(2))]}}
    }


def test_blocks_that_only_the_device_knows() -> None:
    """Model Runner V2 hands over the tables of a step; without them nothing is read, and that is said."""
    cache, kind, _ = filled("content", ORDER)
    layers = {"l": layer(cache, kind)}
    group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["l"])
    runner = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=[group]))
    notes = Notes()
    found = KVContents(notes, runner, layers, notes.errors)  # type: ignore[arg-type]
    table = torch.tensor([[9, 9, 9, 9], [*ORDER, 9]], dtype=torch.int32)
    found.after(["b", "a"], {"b": 0, "a": END}, DeviceTables([table], [SIZE]))
    nothing = digest(rows(1)[:0])
    assert notes.errors == []
    assert notes.messages[0]["keys"] == {"l": [nothing, digest(rows(1))]}
    assert found.layouts == {"l": "content"}
    blind = KVContents(notes, runner, layers, notes.errors)  # type: ignore[arg-type]
    blind.after(["a"], {"a": END}, None)
    assert blind.layouts == {"l": "not read: the block tables of this runner are not known"}
    assert (len(notes.messages), notes.errors) == (1, [])


def test_a_fault_is_noted_and_ends_it() -> None:
    cache, kind, isa = filled("vec", ORDER)
    found, _ = contents([ORDER], {"l": layer(cache, kind, isa)})
    found.after(["unknown"], {})
    found.after(["a"], {"a": END})
    assert found._sink.errors == ["the KV contents ended: KeyError: 'unknown'"]
    assert len(found._sink.messages) == 1


def test_what_is_not_read_is_named() -> None:
    cache, kind, _ = filled("content", ORDER)
    shared = layer(cache, kind)
    shared.kv_sharing_target_layer_name = "first"
    layers = {
        "odd": layer(cache[:, :, :, 1:], kind),
        "isa": layer(cache, "CPUAttentionBackendImpl", "rvv"),
        "other": layer(cache, "StrangeImpl"),
        "none": layer({}, kind),
        "shared": shared,
    }
    found, message = contents([ORDER], layers)
    assert message == {"type": "contents", "keys": {}, "values": {}}
    assert found.layouts == {
        "odd": "not read: the layout [6, 2, 32, 127] of FlashAttentionImpl is not known",
        "isa": "not read: the layout [6, 2, 32, 128] of CPUAttentionBackendImpl for rvv is not known",
        "other": "not read: the layout [6, 2, 32, 128] of StrangeImpl is not known",
        "none": "not read: its cache is dict",
        "shared": "not read: it shares the cache of first",
    }
    windows, _ = contents([ORDER], {"l": layer(cache, kind)}, SlidingWindowSpec)
    assert windows.layouts == {"l": "not read: the cache of a SlidingWindowSpec is not known"}
