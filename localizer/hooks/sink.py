"""From tensors to frames of the ring.

A step has hundreds of small tensors: they share a frame, so that what a frame costs here and in the writer is
paid once for all of them.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from localizer.hooks.callsite import call_site
from localizer.hooks.later import resolved
from localizer.wire.ring import ALIGN, ENTRY, MESSAGE, ROWS, Ring

FRAME_BYTES = 1 << 20
"""Room of a frame, unless the ring is so small that a quarter of it is less."""

TOGETHER_BYTES = 128 << 10
"""Rows of up to so many bytes are copied by one call with what lies between them."""

_WORD = 8

_copy = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""`memmove` that keeps the interpreter lock, which takes longer to hand over than most of the copies."""


class Channel(Protocol):
    """Where the recorder sends what it records: to a ring, at once or by way of a device's buffers."""

    def message(self, **content: Any) -> None:
        """Send a JSON object, values of which may be `Later`."""

    def later(self, tensor: torch.Tensor, convert: Callable[[Any], Any] | None = None) -> Any:
        """What a message may hold for the elements of a tensor: nested lists, converted if asked."""

    def rows(self, sites: Sequence[int | None], tensors: Sequence[torch.Tensor | None], count: int) -> None:
        """Take the first `count` rows of tensors [rows, ...] as they are now, one for each site."""

    def together(self) -> AbstractContextManager[None]:
        """Rows that are given inside of it stay as they are until its end."""

    def flush(self) -> None:
        """Hand over what was sent so far; due at the end of a step."""

    def count(self, **counters: int) -> None:
        """Add to the progress counters."""

    def warm(self) -> None:
        """Take the memory that is needed, now that the engine has taken its own."""

    def close(self) -> None:
        """Say that nothing follows."""


class _Layout:
    """How tensors lie in memory. Sites share it where they can: between taps caches grow cold.

    Attributes:
        shape, strides, dtype: of the whole tensor.
        rows: its length.
        width: bytes of a row.
        pace: bytes from one row to the next.
        plain: whether every row is contiguous and no two overlap, on the CPU.
    """

    __slots__ = ("dtype", "pace", "plain", "rows", "shape", "strides", "width")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.strides, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.rows = self.shape[0]
        row, itemsize = self.shape[1:], tensor.element_size()
        contiguous = tuple(math.prod(row[axis + 1 :]) for axis in range(len(row)))
        self.width, self.pace = math.prod(row) * itemsize, self.strides[0] * itemsize
        self.plain = tensor.is_cpu and self.strides[1:] == contiguous and self.pace >= self.width > 0


class Sink:
    """The producing end of the ring, for tensors on the CPU. After an error nothing more may be sent."""

    def __init__(self, ring: Ring, writer_pid: int) -> None:
        self._ring = ring
        self._writer_pid = writer_pid
        self._bytes = torch.frombuffer(ring.buffer, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        self._layouts: dict[int, _Layout] = {}
        self._shared: dict[tuple[Any, ...], _Layout] = {}
        # a frame has room for rows, and after them for its table
        frame = min(FRAME_BYTES, ring.capacity // 4) // (8 * ALIGN) * (8 * ALIGN)
        self._table_room = frame // 8
        self._table_items = self._table_room // _WORD
        self._most = frame - self._table_room
        self._together = min(TOGETHER_BYTES, self._most // 4)
        # the frame being filled: where its body begins in the ring, its room for rows, how much is used
        self._body = self._room = self._used = 0
        self._table: list[int] = []
        ring.attach()

    def message(self, **content: Any) -> None:
        """Send a JSON object.

        Raises:
            RuntimeError: a value has not arrived yet; nothing is waited for here.
        """
        self.flush()
        content = resolved(content, 0)
        body = json.dumps(content).encode()
        offset = self._ring.reserve(len(body), alive=self._writer_lives)
        self._ring.buffer[offset : offset + len(body)] = body
        self._ring.commit(MESSAGE, len(body))

    def rows(self, sites: Sequence[int | None], tensors: Sequence[torch.Tensor | None], count: int) -> None:
        """Copy the first `count` rows of tensors [rows, ...], one for each site; return when they are copied.

        Where site or tensor is None there is nothing to copy.
        Tensors whose memory overlaps or touches, such as columns of one tensor, are copied by one call.

        Raises:
            ValueError: a tensor has fewer rows.
            RingError: the writer is gone, failed or stuck, or one row is larger than the ring allows.
        """
        if len(self._table) + ENTRY * len(sites) > self._table_items:
            self.flush()
        layouts = self._layouts
        begin = end = 0  # the memory that is still to be copied to where the frame is used up to
        for site, tensor in zip(sites, tensors, strict=True):
            if site is None or tensor is None:
                continue
            layout = layouts.get(site)
            if (
                layout is None
                or tensor.shape != layout.shape
                or tensor.stride() != layout.strides
                or tensor.dtype is not layout.dtype
                or not tensor.is_cpu
            ):
                begin = end = self._move(begin, end)
                layout = self._look(site, tensor)
            if layout.rows < count:
                raise ValueError(f"a tensor of {layout.rows} rows came where {count} are scheduled")
            span = layout.pace * (count - 1) + layout.width
            if count < 1 or not layout.plain or span > self._together:
                begin = end = self._move(begin, end)
                self._pack(site, tensor, count, layout)
                continue
            first = tensor.data_ptr()
            if begin <= first <= end and first + span - begin <= self._together:
                end = max(end, first + span)
            else:
                self._move(begin, end)
                begin, end = first, first + span
                if self._used + self._together > self._room:
                    self._open(self._most)
            self._table += (site, 0, count, layout.width, layout.pace, self._used + first - begin)
        self._move(begin, end)

    def later(self, tensor: torch.Tensor, convert: Callable[[Any], Any] | None = None) -> Any:
        """The elements of a tensor as nested lists, at once; converted if asked."""
        found = tensor.tolist()
        return found if convert is None else convert(found)

    def together(self) -> AbstractContextManager[None]:
        """Rows are copied at once in any case."""
        return nullcontext()

    @property
    def most_bytes(self) -> int:
        """So many bytes `block` takes."""
        return self._ring.capacity // 4 // ALIGN * ALIGN

    def block(self, table: Sequence[int], body: torch.Tensor) -> None:
        """Send rows that lie together on the host, uint8, as one frame; `table` as `ROWS` describes it.

        Unlike `rows` it lets other threads run while it copies, and tells no layout.
        """
        self.flush()
        length = -(-len(body) // ALIGN) * ALIGN
        offset = self._ring.reserve(length + len(table) * _WORD, alive=self._writer_lives)
        ctypes.memmove(self._address + offset, body.data_ptr(), len(body))
        struct.pack_into(f"={len(table)}q", self._ring.buffer, offset + length, *table)
        self._ring.commit(ROWS, length + len(table) * _WORD, (len(table) // ENTRY, length))

    def _move(self, begin: int, end: int) -> int:
        """Copy memory to the frame, if there is any; return 0."""
        if end > begin:
            _copy(self._address + self._body + self._used, begin, end - begin)
            self._used += -(-(end - begin) // ALIGN) * ALIGN
        return 0

    def _pack(self, site: int, tensor: torch.Tensor, count: int, layout: _Layout) -> None:
        """Copy rows of any size and order in memory, without what lies between them."""
        width = layout.width
        step = max(1, self._most // max(width, 1))
        for first in range(0, count, step):
            many = min(step, count - first)
            size = many * width
            if not self._room or self._used + size > self._room:
                self._open(max(self._most, size))
            self._table += (site, first, many, width, width, self._used)
            if layout.plain and layout.pace == width:
                source = tensor.data_ptr() + first * width
                _copy(self._address + self._body + self._used, source, size)
            else:
                start = self._body + self._used
                room = self._bytes[start : start + size].view(tensor.dtype)
                room.view(many, *layout.shape[1:]).copy_(tensor[first : first + many])
            self._used += -(-size // ALIGN) * ALIGN

    def _open(self, room: int) -> None:
        """Begin a frame with room for so many bytes of rows."""
        self.flush()
        room = -(-room // ALIGN) * ALIGN
        self._body = self._ring.reserve(room + self._table_room, alive=self._writer_lives)
        self._room = room

    def flush(self) -> None:
        """Hand over the frame being filled, if it holds anything."""
        table, used = self._table, self._used
        if table:
            struct.pack_into(f"={len(table)}q", self._ring.buffer, self._body + used, *table)
            self._ring.commit(ROWS, used + len(table) * _WORD, (len(table) // ENTRY, used))
            self._table = []
        self._room = self._used = 0

    def _look(self, site: int, tensor: torch.Tensor) -> _Layout:
        """Note how the tensors of a site lie in memory; tell the writer dtype, row shape and code if new."""
        layout, known = _Layout(tensor), self._layouts.get(site)
        if known is None or (layout.dtype, layout.shape[1:]) != (known.dtype, known.shape[1:]):
            name = str(tensor.dtype).removeprefix("torch.")
            self.message(type="layout", site=site, dtype=name, shape=list(layout.shape[1:]), code=call_site())
        key = (layout.shape, layout.strides, layout.dtype, layout.plain)
        self._layouts[site] = layout = self._shared.setdefault(key, layout)
        return layout

    def count(self, **counters: int) -> None:
        """Add to the ring's progress counters."""
        self._ring.count(**counters)

    def warm(self) -> None:
        """Map the ring's memory, which is due when the engine has measured how much memory it may use."""
        self._ring.warm()

    def close(self) -> None:
        """Say that nothing follows."""
        self.flush()
        self._ring.close()

    def _writer_lives(self) -> bool:
        try:
            os.kill(self._writer_pid, 0)
        except ProcessLookupError:
            return False
        return True
