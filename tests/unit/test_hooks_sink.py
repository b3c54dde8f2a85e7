"""Tensors reach the ring as they are: real rows only, in C order, announced by their layout."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from localizer.hooks.sink import Sink  # noqa: E402 - needs torch
from localizer.store.dtypes import NUMPY  # noqa: E402
from localizer.wire import ring as rings  # noqa: E402
from localizer.wire.ring import MESSAGE, Ring, RingError  # noqa: E402


class Pair:
    """A sink and the consuming end of its ring."""

    def __init__(self, capacity: int = 1 << 14) -> None:
        fd = rings.create(capacity)
        self.ring = Ring(fd)
        self.sink = Sink(Ring(fd), os.getpid())
        os.close(fd)
        self.frames: list[int] = []

    def taken(self) -> list[Any]:
        """Messages as objects, rows as (site, first, count, bytes)."""
        self.sink.flush()
        found: list[Any] = []
        for frame in self.ring.frames(lambda: True):
            body = bytes(frame.body)
            if frame.kind == MESSAGE:
                found.append(json.loads(body))
                continue
            self.frames.append(len(body))
            for site, first, count, width, pace, offset in struct.iter_unpack("=6q", body[frame.args[1] :]):
                places = range(offset, offset + count * pace, max(pace, 1))
                rows = b"".join(body[place : place + width] for place in places)
                assert offset + (count - 1) * pace + width <= frame.args[1]
                found.append((site, first, count, rows))
        return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.ring.unmap()


def raw(tensor: Any) -> bytes:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", sorted(NUMPY))
def test_every_dtype(pair: Pair, name: str) -> None:
    dtype = getattr(torch, name)
    width = torch.empty((), dtype=dtype).element_size()
    tensor = torch.arange(6 * width, dtype=torch.uint8).view(dtype) if name != "bool" else torch.ones(6) > 0
    pair.sink.rows([4], [tensor.view(2, 3)], 2)
    layout, rows = pair.taken()
    assert layout == {"type": "layout", "site": 4, "dtype": name, "shape": [3], "code": ""}
    assert rows == (4, 0, 2, raw(tensor))


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 3, 4), (5, 0), (5, 1, 1)])
def test_only_real_rows_are_sent(pair: Pair, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    pair.sink.rows([0], [tensor], 3)
    layout, rows = pair.taken()
    assert layout["shape"] == list(shape[1:])
    assert rows == (0, 0, 3, raw(tensor[:3]))


@pytest.mark.parametrize("rows", [1, 2, 5, 64, 65, 100])
def test_rows_of_any_layout_in_memory(pair: Pair, rows: int) -> None:
    wide = torch.randn(2 * rows, 4, 3)
    for tensor in (
        wide[:rows],
        wide[rows:],
        wide[::2],
        wide[:rows, 1],
        wide[:rows, :, 1],
        wide[:rows, 1:3],
        wide[:rows].transpose(1, 2),
        wide[:1].expand(rows, 4, 3),
        wide.flatten()[:rows],
        wide.flatten()[::12][:rows],
        wide[:rows, :, :1],
        wide[:rows, :0],
    ):
        pair.sink.rows([0], [tensor], rows)
        received = b"".join(found[3] for found in pair.taken() if not isinstance(found, dict))
        assert received == raw(tensor)


def test_what_is_sent_is_what_was_there_then(pair: Pair) -> None:
    """Fused kernels overwrite their inputs in place as soon as the tap returns."""
    tensor = torch.zeros(2, 3)
    pair.sink.rows([0], [tensor], 2)
    tensor.fill_(7)
    assert pair.taken()[1] == (0, 0, 2, bytes(24))


def test_layouts_are_announced_once_and_when_they_change(pair: Pair) -> None:
    for tensor in (torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, 4), torch.zeros(2, 4).bfloat16()):
        pair.sink.rows([0], [tensor], 2)
    pair.sink.rows([1], [torch.zeros(2, 3)], 2)
    layouts = [
        (found["site"], found["dtype"], found["shape"]) for found in pair.taken() if isinstance(found, dict)
    ]
    assert layouts == [(0, "float32", [3]), (0, "float32", [4]), (0, "bfloat16", [4]), (1, "float32", [3])]


def test_many_rows_are_sent_in_parts(pair: Pair) -> None:
    tensor = torch.randn(100, 16)
    pair.sink.rows([0], [tensor[:0]], 0)
    received, parts = b"", 0
    for start in range(0, 100, 25):
        pair.sink.rows([0], [tensor[start : start + 25]], 25)
        for found in pair.taken():
            if not isinstance(found, dict):
                received, parts = received + found[3], parts + 1
    assert received == raw(tensor)
    pair.sink.rows([1], [torch.randn(100, 16)], 100)
    counts = [found[1:3] for found in pair.taken() if not isinstance(found, dict)]
    assert counts == [(0, 56), (56, 44)]


def test_columns_of_one_tensor_are_copied_once(pair: Pair) -> None:
    """As query, key and value are; with one row they only touch each other."""
    for rows in (1, 5, 20):
        whole = torch.randn(rows, 12, 4)
        parts = [whole[:, :6], whole[:, 6:9], whole[:, 9:], torch.randn(rows, 3), whole[:, 2:5, 1:3]]
        pair.sink.rows(range(len(parts)), parts, rows)
        found = [item for item in pair.taken() if not isinstance(item, dict)]
        for site, part in enumerate(parts):
            assert b"".join(item[3] for item in found if item[0] == site) == raw(part)
    whole = torch.randn(4, 12, 4)
    for _ in range(2):  # the first time their layouts are announced in between
        pair.frames.clear()
        pair.sink.rows([0, 1, 2], [whole[:, :6], whole[:, 6:9], whole[:, 9:]], 4)
        pair.taken()
    assert pair.frames == [4 * 12 * 4 * 4 + 3 * 6 * 8]


def test_rows_of_many_tensors_share_a_frame(pair: Pair) -> None:
    tensors = [torch.randn(2, 3) for _ in range(30)]
    for _ in range(2):  # the first time their layouts are announced in between
        pair.frames.clear()
        for site, tensor in enumerate(tensors):
            pair.sink.rows([site], [tensor], 2)
        found = [item for item in pair.taken() if not isinstance(item, dict)]
        assert found == [(site, 0, 2, raw(tensor)) for site, tensor in enumerate(tensors)]
    assert len(pair.frames) == 3  # a table of this small ring has room for ten


def test_a_message_comes_after_the_rows_before_it(pair: Pair) -> None:
    pair.sink.rows([0], [torch.zeros(1)], 1)
    pair.sink.rows([0], [torch.ones(1)], 1)
    pair.sink.message(type="end")
    pair.sink.rows([0], [torch.zeros(1)], 1)
    kinds = [found["type"] if isinstance(found, dict) else "rows" for found in pair.taken()]
    assert kinds == ["layout", "rows", "rows", "end", "rows"]


def test_a_full_ring_waits_for_the_writer() -> None:
    pair = Pair()
    received: list[Any] = []
    tensors = [torch.randn(8, 16) for _ in range(400)]  # twelve times what the ring holds

    def serve() -> None:
        while len(received) < len(tensors):
            time.sleep(0.001)
            for frame in pair.ring.frames(lambda: True):
                if frame.kind != MESSAGE:
                    table = struct.iter_unpack("=6q", bytes(frame.body[frame.args[1] :]))
                    received.extend(bytes(frame.body[entry[5] : entry[5] + 512]) for entry in table)

    thread = threading.Thread(target=serve)
    thread.start()
    for tensor in tensors:
        pair.sink.rows([0], [tensor], 8)
    pair.sink.flush()
    thread.join(60)
    assert received == [raw(tensor) for tensor in tensors]


def test_too_few_rows_are_never_made_up(pair: Pair) -> None:
    for tensor in (torch.zeros(1, 3), torch.zeros(4, 3)):
        with pytest.raises(ValueError, match="5 are scheduled"):
            pair.sink.rows([0], [tensor], 5)


def test_a_row_larger_than_the_ring_is_refused(pair: Pair) -> None:
    with pytest.raises(RingError, match="does not fit"):
        pair.sink.rows([0], [torch.zeros(1, 1 << 14)], 1)


def test_a_writer_that_is_gone_is_noticed() -> None:
    pair = Pair()
    pair.sink._writer_pid = 1 << 30  # no process has such a number
    many = torch.zeros(100, 400)  # more than the ring holds
    with pytest.raises(RingError, match="gone"):
        pair.sink.rows([0], [many], 100)


def test_counters_and_the_end(pair: Pair) -> None:
    assert pair.ring.attached
    pair.sink.count(steps=1, rows=2, dummy=3)
    assert pair.ring.progress == (1, 2, 3)
    pair.sink.close()
    assert list(pair.ring.frames(lambda: False)) == []
