"""Rows and values of a device: packed there, moved by a side stream, handed to the ring by a thread.

What a step records is copied on the compute stream into one of two buffers on the device, where it is safe
from being overwritten. When the step is over, a side stream moves the buffer to pinned memory of the host;
events order the two streams, and the pump thread waits for the last one. Neither the compute stream nor the
engine's thread waits for the host, unless all pinned buffers are full: that wait is bounded.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch

from localizer.hooks.callsite import call_site
from localizer.hooks.later import PATIENCE, Later, resolved
from localizer.hooks.pack import Message, Packing, Run, Value, pieces
from localizer.hooks.pump import Pump
from localizer.hooks.sink import Sink
from localizer.wire import rowsum

BUFFER_BYTES = 32 << 20
"""Bytes of a buffer, unless the ring is so small that a quarter of it is less."""

DEVICE_BUFFERS, HOST_BUFFERS = 2, 4

LONGEST_RUN = 4 << 20
"""Rows of so many bytes share a frame of the ring."""

MOST_VIEWS = 8192
"""So many views into the buffers are kept; the steps of a decode lie in the same places."""


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait on the host until the stream is there, without the interpreter lock."""


class Transport(Protocol):
    """How bytes get from the device to the host."""

    def on_device(self, size: int) -> torch.Tensor:
        """A buffer on the device, uint8."""

    def on_host(self, size: int) -> torch.Tensor:
        """A buffer on the host that the device can copy to by itself, uint8."""

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Copy, after all that the compute stream has been given so far; the event says when it is done."""

    def hold(self, event: Event) -> None:
        """Let the compute stream, not the host, wait for an event."""


class CudaTransport:
    """Pinned memory and a side stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def on_device(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def on_host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        packed, done = torch.cuda.Event(), torch.cuda.Event(blocking=True)
        packed.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            self._side.wait_event(packed)
            target.copy_(source, non_blocking=True)
            done.record(self._side)
        return done

    def hold(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


class Hashing(Protocol):
    """Hashes rows on the device; see `localizer.hooks.rowdigest.RowDigests`."""

    def __call__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Write the digests of rows [rows, ...] to uint8 [rows, 16]."""

    def stack(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Write those of a stack of tensors [tensors, rows, ...] to uint8 [tensors, rows, 16]."""

    def check(self) -> None:
        """Make sure that they are right.

        Raises:
            CannotTap: they are not.
        """


@dataclass
class _Sent:
    """A packed buffer on its way: when it arrives, where, and what it holds."""

    arrived: Event | None
    host: torch.Tensor | None
    items: list[Message | Value | Run]


class DeviceSink:
    """The producing end of the ring, for tensors on a device; a `localizer.hooks.sink.Channel`.

    Args:
        sink: the ring's end; only the pump thread sends through it.
        transport: how bytes get to the host.
        size: bytes of a buffer.
        patience: seconds for which room or a value is waited for.
        hashing: hashes rows on the device; None if that is the host's work.

    Attributes:
        hashes: whether the rows of a site are hashed on the device; of those only the digests are sent.
    """

    def __init__(
        self,
        sink: Sink,
        transport: Transport,
        size: int = BUFFER_BYTES,
        patience: float = PATIENCE,
        hashing: Hashing | None = None,
    ) -> None:
        self._sink, self._transport, self._patience = sink, transport, patience
        self._size = min(size, sink.most_bytes)
        self._longest = min(LONGEST_RUN, self._size)
        self._packing = Packing(self._size, self._longest)
        self._device: list[torch.Tensor] = []
        self._leaving: list[Event | None] = [None] * DEVICE_BUFFERS
        self._turn = 0
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._layouts: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._views: dict[tuple[Any, ...], torch.Tensor] = {}
        # what is to be copied next, by one call: to where, from where
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._hashing = hashing
        self.hashes: Callable[[int], bool] = lambda site: False
        self._hashed: set[int] = set()
        # rows that are to be hashed next, and where their digests go
        self._rows: list[torch.Tensor] = []
        self._digests: list[torch.Tensor] = []
        self._pump: Pump[_Sent] = Pump(self._deliver, self._release)

    # -- the engine's thread ---------------------------------------------------------------------------

    def message(self, **content: Any) -> None:
        """Send a JSON object, when all values in it have arrived."""
        self._packing.message(content)

    def later(self, tensor: torch.Tensor, convert: Callable[[Any], Any] | None = None) -> Later:
        """The elements of a tensor, as nested lists, converted if asked: something a message may hold."""
        later = Later(convert)
        tensor = tensor.detach()
        size = tensor.numel() * tensor.element_size()
        if size > self._size:
            raise ValueError(f"a value of {size} bytes does not fit a buffer of {self._size} bytes")
        place = self._packing.value(later, size, tensor.dtype, tuple(tensor.shape))
        if place is None:
            self.flush()
            place = self._packing.value(later, size, tensor.dtype, tuple(tensor.shape))
        assert place is not None
        self._view(place, tensor.dtype, tuple(tensor.shape)).copy_(tensor, non_blocking=True)
        return later

    def rows(self, sites: Sequence[int | None], tensors: Sequence[torch.Tensor | None], count: int) -> None:
        """Copy the first `count` rows of tensors [rows, ...], one for each site, when the device gets there.

        Raises:
            ValueError: a tensor has fewer rows, or a row is larger than a buffer.
            RuntimeError: what was recorded before did not reach the writer.
        """
        for site, tensor in zip(sites, tensors, strict=True):
            if site is None or tensor is None:
                continue
            if tensor.shape[0] < count:
                raise ValueError(f"a tensor of {tensor.shape[0]} rows came where {count} are scheduled")
            shape = tuple(tensor.shape[1:])
            if self._layouts.get(site) != (tensor.dtype, shape):
                self._look(site, tensor.dtype, shape)
            hashed = site in self._hashed
            width = rowsum.SIZE if hashed else math.prod(shape) * tensor.element_size()
            if width > self._longest:
                raise ValueError(f"a row of {width} bytes does not fit a frame of {self._longest} bytes")
            for first, many in pieces(count, width, self._longest):
                place = self._place([site], first, many, width)
                if hashed:
                    self._digests.append(self._view(place, torch.uint8, (many, width)))
                    self._rows.append(tensor[first : first + many])
                elif width:
                    self._targets.append(self._view(place, tensor.dtype, (many, *shape)))
                    self._sources.append(tensor[first : first + many])
        self._copy()

    def _look(self, site: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Note how the rows of a site look and whether they are hashed here, and tell the writer."""
        self._layouts[site] = dtype, shape
        algorithm = {}
        if self._hashing is not None and self.hashes(site):
            self._hashed.add(site)
            algorithm = {"digest": rowsum.ROWSUM}
        name = str(dtype).removeprefix("torch.")
        self.message(type="layout", site=site, dtype=name, shape=list(shape), code=call_site(), **algorithm)

    def stack(self, sites: Sequence[int], tensors: torch.Tensor, count: int) -> None:
        """Copy the first `count` rows of each of tensors [sites, rows, ...] by few launches.

        Raises:
            ValueError, RuntimeError: as `rows` does.
        """
        if tensors.shape[1] < count:
            raise ValueError(f"tensors of {tensors.shape[1]} rows came where {count} are scheduled")
        layout = tensors.dtype, tuple(tensors.shape[2:])
        for site in sites:
            if self._layouts.get(site) != layout:
                self._look(site, *layout)
        start = 0
        for hashed, several in groupby(sites, self._hashed.__contains__):
            part = list(several)
            self._stack(part, tensors[start : start + len(part)], count, hashed)
            start += len(part)

    def _stack(self, sites: Sequence[int], tensors: torch.Tensor, count: int, hashed: bool) -> None:
        """The same for sites all of which, or none, are hashed here."""
        shape = tuple(tensors.shape[2:])
        width = rowsum.SIZE if hashed else math.prod(shape) * tensors.element_size()
        if count * width > self._longest:
            self.rows(sites, tensors.unbind(), count)
            return
        for start, many in pieces(len(sites), count * width, self._longest):
            place = self._place(sites[start : start + many], 0, count, width)
            taken = tensors[start : start + many, :count]
            if hashed:
                assert self._hashing is not None
                self._hashing.stack(taken, self._view(place, torch.uint8, (many, count, width)))
            elif width and count:
                self._view(place, tensors.dtype, (many, count, *shape)).copy_(taken)

    def _place(self, sites: Sequence[int], first: int, count: int, width: int) -> int:
        """Take room for rows of sites in a buffer, in the next one if this is full; their offset."""
        place = self._packing.rows(sites, first, count, width)
        if place is None:
            self.flush()
            place = self._packing.rows(sites, first, count, width)
        assert place is not None
        return place

    def _copy(self) -> None:
        """Copy, and hash, what is due."""
        if self._rows:
            rows, digests = self._rows, self._digests
            self._rows, self._digests = [], []
            assert self._hashing is not None
            self._hashing(rows, digests)
        targets, sources = self._targets, self._sources
        if len(targets) == 1:  # as large as logits may be: by many blocks
            targets[0].copy_(sources[0])
        elif targets:
            torch._foreach_copy_(targets, sources)
        self._targets, self._sources = [], []

    def _view(self, place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The part of the device's buffer under way that a tensor of this shape takes."""
        if not self._device:
            self._allocate()
        key = self._turn, place, dtype, shape
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            part = self._device[self._turn][place : place + math.prod(shape) * dtype.itemsize]
            self._views[key] = view = part.view(dtype).view(shape)
        return view

    def _allocate(self) -> None:
        self._device = [self._transport.on_device(self._size) for _ in range(DEVICE_BUFFERS)]
        for _ in range(HOST_BUFFERS):
            self._free.put(self._transport.on_host(self._size))

    def flush(self) -> None:
        """Send what is packed on its way.

        Raises:
            RuntimeError: no host buffer became free in time, or what was sent did not reach the writer.
        """
        self._copy()
        packing, self._packing = self._packing, Packing(self._size, self._longest)
        if not packing.items:
            return
        self._pump.check()
        if not packing.used:
            self._pump.put(_Sent(None, None, packing.items))
            return
        if not self._device:
            self._allocate()
        try:
            host = self._free.get(timeout=self._patience)
        except queue.Empty:
            raise RuntimeError(
                f"the writer took nothing from the device for {self._patience:.0f} seconds"
            ) from None
        arrived = self._transport.send(self._device[self._turn][: packing.used], host[: packing.used])
        self._leaving[self._turn] = arrived
        self._pump.put(_Sent(arrived, host, packing.items))
        self._turn = (self._turn + 1) % DEVICE_BUFFERS
        leaving = self._leaving[self._turn]
        if leaving is not None:
            self._transport.hold(leaving)

    def count(self, **counters: int) -> None:
        """Add to the ring's progress counters."""
        self._sink.count(**counters)

    def warm(self) -> None:
        """Allocate the buffers, which is due when the engine has measured how much memory it may use.

        Raises:
            CannotTap: rows are not hashed here as they should be.
        """
        self._sink.warm()
        if not self._device:
            self._allocate()
        if self._hashing is not None:
            self._hashing.check()

    def close(self) -> None:
        """Say that nothing follows, when everything has arrived.

        Raises:
            RuntimeError: something did not.
        """
        try:
            self.flush()
            self._pump.close(2 * self._patience)
        finally:
            self._sink.close()

    # -- the pump's thread -----------------------------------------------------------------------------

    def _deliver(self, sent: _Sent) -> None:
        if sent.arrived is not None:
            sent.arrived.synchronize()
        for item in sent.items:
            if isinstance(item, Message):
                self._sink.message(**resolved(item.content, self._patience))
                continue
            assert sent.host is not None
            if isinstance(item, Value):
                part = sent.host[item.offset : item.offset + item.size]
                item.later.arrive(part.view(item.dtype).view(item.shape).tolist())
            else:
                self._sink.block(item.table, sent.host[item.begin : item.end])

    def _release(self, sent: _Sent) -> None:
        if sent.host is not None:
            self._free.put(sent.host)
