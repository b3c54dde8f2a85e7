"""Rows and values reach the ring by way of a device's buffers, in order, however the device is late.

The device is doubled: its memory is the host's, and a thread stands for the side stream, so that what is sent
arrives late. That CUDA's streams do the same is shown on a GPU.
"""

from __future__ import annotations

import json
import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from localizer.hooks.device import DeviceSink  # noqa: E402 - needs torch
from localizer.hooks.guard import Guard  # noqa: E402
from localizer.hooks.later import Later  # noqa: E402
from localizer.hooks.layout import CannotTap  # noqa: E402
from localizer.hooks.sink import Sink  # noqa: E402
from localizer.wire import ring as rings  # noqa: E402
from localizer.wire import rowsum  # noqa: E402
from localizer.wire.ring import MESSAGE, Ring  # noqa: E402


class DoubledTransport:
    """Stands in for CUDA: copies in a thread, `lag` seconds late, only while the gate is open."""

    def __init__(self, lag: float = 0.0) -> None:
        self.lag, self.gate, self.held = lag, threading.Event(), 0
        self.gate.set()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            self.gate.wait()
            time.sleep(self.lag)
            job()

    def on_device(self, size: int) -> Any:
        return torch.full((size,), 0xAA, dtype=torch.uint8)

    def on_host(self, size: int) -> Any:
        return torch.full((size,), 0x55, dtype=torch.uint8)

    def send(self, source: Any, target: Any) -> Any:
        done = threading.Event()

        def copy() -> None:
            target.copy_(source)
            done.set()

        self._jobs.put(copy)
        return Arrival(done)

    def hold(self, event: Any) -> None:
        """The compute stream waits; here it is the host's own thread."""
        self.held += 1
        event.synchronize()


class Arrival:
    def __init__(self, done: threading.Event) -> None:
        self._done = done

    def synchronize(self) -> None:
        assert self._done.wait(10)


class DoubledHashing:
    """Stands in for the kernel: the reference, on the host."""

    wrong = False

    def check(self) -> None:
        if self.wrong:
            raise CannotTap("it is wrong")

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, sources: Any, targets: Any) -> None:
        self.calls.append(len(sources))
        for source, target in zip(sources, targets, strict=True):
            assert (target.dtype, target.shape) == (torch.uint8, (len(source), 16))
            assert target.data_ptr() % 8 == 0
            target.copy_(torch.from_numpy(rowsum.digests(bytes_of(source))))

    def stack(self, source: Any, target: Any) -> None:
        self(source.unbind(), target.unbind())


def bytes_of(tensor: Any) -> Any:
    """uint8 [rows, bytes] in numpy."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return np.frombuffer(raw(whole.flatten()), np.uint8).reshape(len(tensor), -1)


class Line:
    """A device sink and the consuming end of its ring."""

    def __init__(
        self, size: int = 1 << 12, capacity: int = 1 << 16, lag: float = 0.0, hashing: Any = None
    ) -> None:
        fd = rings.create(capacity)
        self.ring = Ring(fd)
        self.transport = DoubledTransport(lag)
        self.sink = DeviceSink(Sink(Ring(fd), os.getpid()), self.transport, size, patience=5, hashing=hashing)
        os.close(fd)

    def taken(self) -> list[Any]:
        """Messages as objects, rows as (site, first, count, bytes), until the sink is closed."""
        found: list[Any] = []
        for frame in self.ring.frames(lambda: False, pause=0.001, linger=0.0):
            body = bytes(frame.body)
            if frame.kind == MESSAGE:
                found.append(json.loads(body))
                continue
            for site, first, count, width, pace, offset in struct.iter_unpack("=6q", body[frame.args[1] :]):
                assert pace == width
                found.append((site, first, count, body[offset : offset + count * width]))
        return found


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.ring.unmap()


def raw(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def closed(line: Line) -> list[Any]:
    """All that was sent; the sink is closed in a thread of its own, as back-pressure may need the reader."""
    closing = threading.Thread(target=line.sink.close)
    closing.start()
    found = line.taken()
    closing.join(10)
    return found


def test_rows_are_those_at_the_time_of_the_call(line: Line) -> None:
    tensor = torch.randn(5, 3, 4).transpose(1, 2)
    expected = raw(tensor[:3])
    line.sink.rows([0, None], [tensor, torch.zeros(9)], 3)
    tensor.zero_()
    layout, rows = closed(line)
    assert layout == {"type": "layout", "site": 0, "dtype": "float32", "shape": [4, 3], "code": ""}
    assert rows == (0, 0, 3, expected)


@pytest.mark.parametrize("count", [0, 1, 5, 40])
@pytest.mark.parametrize("size", [1 << 10, 1 << 14])
def test_a_stack_is_sent_as_its_tensors_are(count: int, size: int) -> None:
    """Whether it fits a buffer as a whole, in part, or not even a tensor of it does."""
    stack = torch.randn(12, 40, 3, 4).transpose(2, 3)
    expected = [raw(tensor[:count]) for tensor in stack]
    line = Line(size=size)
    line.sink.message(type="before")
    line.sink.stack(range(12), stack, count)
    stack.zero_()
    found: dict[int, bytes] = dict.fromkeys(range(12), b"")
    for item in closed(line):
        if not isinstance(item, dict):
            site, first, _, rows = item
            assert first == len(found[site]) // 48
            found[site] += rows
        elif item["type"] == "layout":
            assert (item["dtype"], item["shape"]) == ("float32", [4, 3])
    assert list(found.values()) == expected
    line.ring.unmap()


def test_a_stack_with_too_few_rows_is_refused(line: Line) -> None:
    with pytest.raises(ValueError, match="tensors of 3 rows came where 4 are scheduled"):
        line.sink.stack([0, 1], torch.zeros(2, 3, 8), 4)
    closed(line)


def test_of_rows_that_are_hashed_only_digests_are_sent() -> None:
    """In the place of rows, in order with them, hashed at the time of the call, however large a row is."""
    hashing = DoubledHashing()
    line = Line(hashing=hashing)
    line.sink.hashes = {0, 2}.__contains__
    query, key = torch.randn(5, 3, 4).transpose(1, 2), torch.randn(5, 6, dtype=torch.bfloat16)[:, :4]
    logits = torch.randn(3, 4000)
    expected = [rowsum.digests(bytes_of(tensor)).tobytes() for tensor in (query, logits)]
    plain = raw(key)
    line.sink.rows([0, 1, None], [query, key, None], 5)
    query.zero_()
    line.sink.rows([2], [logits], 3)
    logits.zero_()
    layouts, rows = [], []
    for item in closed(line):
        (layouts if isinstance(item, dict) else rows).append(item)
    assert [(item["site"], item["dtype"], item["shape"], item.get("digest")) for item in layouts] == [
        (0, "float32", [4, 3], rowsum.ROWSUM),
        (1, "bfloat16", [4], None),
        (2, "float32", [4000], rowsum.ROWSUM),
    ]
    assert rows == [(0, 0, 5, expected[0]), (1, 0, 5, plain), (2, 0, 3, expected[1])]
    line.ring.unmap()


def test_a_device_that_hashes_wrongly_is_refused_before_the_first_step() -> None:
    """Not when the model is loaded: what the check allocates would be missing where vLLM sizes its cache."""
    hashing = DoubledHashing()
    line = Line(hashing=hashing)
    hashing.wrong = True
    errors: list[str] = []
    with pytest.raises(CannotTap, match="it is wrong"):
        Guard("the observer stopped recording", errors)(line.sink.warm)()
    assert errors == []
    hashing.wrong = False
    line.sink.warm()
    line.sink.close()
    line.ring.unmap()


def test_of_a_stack_the_sites_that_are_hashed_are() -> None:
    hashing = DoubledHashing()
    line = Line(hashing=hashing)
    line.sink.hashes = lambda site: site > 2
    stack = torch.randn(6, 20, 4)
    expected = [raw(tensor[:7]) for tensor in stack[:3]]
    expected += [rowsum.digests(bytes_of(tensor[:7])).tobytes() for tensor in stack[3:]]
    line.sink.stack(range(6), stack, 7)
    stack.zero_()
    rows = [item for item in closed(line) if not isinstance(item, dict)]
    assert rows == [(site, 0, 7, body) for site, body in enumerate(expected)]
    assert hashing.calls == [3]
    line.ring.unmap()


def test_messages_and_rows_keep_their_order(line: Line) -> None:
    line.sink.message(type="a")
    line.sink.rows([1], [torch.ones(2)], 2)
    line.sink.message(type="b")
    line.sink.rows([1], [torch.zeros(2)], 2)
    kinds = [item["type"] if isinstance(item, dict) else item[0] for item in closed(line)]
    assert kinds == ["a", "layout", 1, "b", 1]


def test_values_arrive_with_their_buffer(line: Line) -> None:
    tokens = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32)
    later = line.sink.later(tokens, lambda rows: dict(zip("ab", rows, strict=True)))
    tokens.zero_()
    line.sink.message(type="end", proposed=later, plain=3)
    assert closed(line) == [{"type": "end", "proposed": {"a": [5, 6], "b": [7, 8]}, "plain": 3}]


def test_a_value_from_another_thread_holds_up_what_follows(line: Line) -> None:
    sampled = Later()
    line.sink.message(type="end", sampled=sampled)
    line.sink.flush()
    line.sink.message(type="next")
    line.sink.flush()
    time.sleep(0.05)
    assert line.ring.progress == (0, 0, 0)
    sampled.arrive({"a": [1]})
    assert [item["type"] for item in closed(line)] == ["end", "next"]


@pytest.mark.parametrize("lag", [0.0, 0.002])
def test_more_than_the_buffers_hold(lag: float) -> None:
    """Tensors larger than a buffer are cut between rows; buffers are used again only when they are free."""
    line = Line(size=1 << 10, capacity=1 << 14, lag=lag)
    tensors = [torch.arange(600, dtype=torch.int16).view(100, 6) + number for number in range(20)]

    def send() -> None:
        for number, tensor in enumerate(tensors):
            line.sink.message(type="step", number=number)
            line.sink.rows([0], [tensor], 100)
            tensor.fill_(-1)
            line.sink.flush()
        line.sink.close()

    expected = [raw(tensor) for tensor in tensors]
    sending = threading.Thread(target=send)
    sending.start()
    found: list[bytes] = []
    at = 0
    for item in line.taken():
        if isinstance(item, dict):
            if item["type"] == "step":
                assert item["number"] == len(found)
                found.append(b"")
                at = 0
        else:
            assert item[1] == at
            at += item[2]
            found[-1] += item[3]
    sending.join(10)
    assert found == expected
    assert line.transport.held > 20
    line.ring.unmap()


def test_the_engine_waits_only_when_all_host_buffers_are_full() -> None:
    line = Line(size=1 << 10)
    line.transport.gate.clear()  # the device is stuck
    done = []

    def step() -> None:
        line.sink._packing.message({"type": "x"})  # without hold(), which here would wait for the device
        line.sink._packing.place(8)
        line.sink._leaving = [None, None]
        line.sink.flush()
        done.append(1)

    line.sink.warm()
    engine = threading.Thread(target=lambda: [step() for _ in range(4)])
    engine.start()
    engine.join(5)
    assert len(done) == 4
    late = threading.Thread(target=step)
    late.start()
    late.join(0.1)
    assert late.is_alive()
    line.transport.gate.set()
    late.join(5)
    assert len(done) == 5
    closed(line)
    line.ring.unmap()


def test_a_device_that_stays_stuck_ends_the_recording() -> None:
    line = Line(size=1 << 10)
    line.sink._patience = 0.05
    line.sink.warm()
    for _ in range(4):
        line.sink._free.get()
    line.sink.rows([0], [torch.ones(2)], 2)
    with pytest.raises(RuntimeError, match="took nothing from the device"):
        line.sink.flush()


def test_a_fault_behind_the_engine_reaches_it() -> None:
    line = Line()
    line.ring.fail()
    line.sink.rows([0], [torch.ones(2)], 2)
    line.sink.flush()
    deadline = time.monotonic() + 60
    while line.sink._pump.error is None and time.monotonic() < deadline:
        time.sleep(0.001)
    line.sink.message(type="end")
    with pytest.raises(RuntimeError, match="RingError: the writer has failed"):
        line.sink.flush()
    with pytest.raises(RuntimeError, match="the writer has failed"):
        line.sink.close()


def test_tokens_that_never_come_are_an_error(line: Line) -> None:
    line.sink._patience = 0.02
    line.sink.message(type="end", sampled=Later())
    with pytest.raises(RuntimeError, match="did not come within"):
        line.sink.close()
    failed = Later()
    failed.fail("vLLM failed")
    with pytest.raises(RuntimeError, match="vLLM failed"):
        failed.get(1)


def test_what_cannot_be_packed_is_refused(line: Line) -> None:
    with pytest.raises(ValueError, match="2 rows came where 3"):
        line.sink.rows([0], [torch.ones(2)], 3)
    with pytest.raises(ValueError, match="a row of 8192 bytes does not fit"):
        line.sink.rows([0], [torch.ones(2, 2048)], 2)
    with pytest.raises(ValueError, match="a value of 8000 bytes"):
        line.sink.later(torch.zeros(1000, dtype=torch.int64))


def test_a_layout_that_changes_is_told_again(line: Line) -> None:
    for width in (2, 2, 3):
        line.sink.rows([0], [torch.ones(1, width)], 1)
    layouts = [item["shape"] for item in closed(line) if isinstance(item, dict)]
    assert layouts == [[2], [3]]


def test_rows_without_elements(line: Line) -> None:
    line.sink.rows([0], [torch.ones(3, 0)], 3)
    assert closed(line)[1:] == [(0, 0, 3, b"")]
