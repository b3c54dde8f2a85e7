"""From tensors to frames of the ring."""

from __future__ import annotations

import ctypes
import json
import math
import os
from typing import Any

import torch

from localizer.wire.ring import MESSAGE, ROWS, Ring

FEW_ROWS = 64
"""Up to so many separate rows are copied one by one."""


class _Layout:
    """Dtype, shape and contiguous strides of one row of a site; `width` in bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape, self.itemsize = tensor.dtype, tensor.shape[1:], tensor.element_size()
        self.elements = math.prod(self.shape)
        self.width = self.elements * self.itemsize
        self.strides = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))


class Sink:
    """The producing end of the ring, for tensors on the CPU."""

    def __init__(self, ring: Ring, writer_pid: int) -> None:
        self._ring = ring
        self._writer_pid = writer_pid
        self._bytes = torch.frombuffer(ring.buffer, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        self._layouts: dict[int, _Layout] = {}
        self._largest = ring.capacity // 4
        ring.attach()

    def message(self, **content: Any) -> None:
        """Send a JSON object."""
        body = json.dumps(content).encode()
        offset = self._ring.reserve(MESSAGE, len(body), alive=self._writer_lives)
        self._ring.buffer[offset : offset + len(body)] = body
        self._ring.commit()

    def rows(self, site: int, tensor: torch.Tensor, count: int) -> None:
        """Copy the first `count` rows of `tensor` [rows, ...] of a site; returns when they are copied.

        Raises:
            ValueError: the tensor has fewer rows.
            RingError: the writer is gone, failed or stuck, or one row is larger than the ring allows.
        """
        layout = self._layouts.get(site)
        shape = tensor.shape
        if layout is None or tensor.dtype is not layout.dtype or shape[1:] != layout.shape:
            layout = self._announce(site, tensor)
        if shape[0] < count:
            raise ValueError(f"a tensor of {shape[0]} rows came where {count} are scheduled")
        step = max(1, self._largest // max(layout.width, 1))
        for first in range(0, count, step):
            many = min(step, count - first)
            offset = self._ring.reserve(
                ROWS, many * layout.width, (site, first, many), alive=self._writer_lives
            )
            self._copy(tensor if many == count else tensor[first:], many, layout, offset)
            self._ring.commit()

    def _copy(self, tensor: torch.Tensor, count: int, layout: _Layout, offset: int) -> None:
        """Copy rows into the ring; small ones without torch, whose calls cost more than the bytes."""
        strides = tensor.stride()
        rows = 1 if count == 1 or strides[0] == layout.elements else count
        if tensor.is_cpu and strides[1:] == layout.strides and rows <= FEW_ROWS:
            source, pace = tensor.data_ptr(), strides[0] * layout.itemsize
            target, size = self._address + offset, count * layout.width // rows
            for row in range(rows):
                ctypes.memmove(target + row * size, source + row * pace, size)
        else:
            room = self._bytes[offset : offset + count * layout.width]
            room.view(tensor.dtype).view(count, *layout.shape).copy_(tensor[:count])

    def _announce(self, site: int, tensor: torch.Tensor) -> _Layout:
        """Tell the writer dtype and row shape of a site."""
        layout = _Layout(tensor)
        name = str(tensor.dtype).removeprefix("torch.")
        self.message(type="layout", site=site, dtype=name, shape=list(layout.shape))
        self._layouts[site] = layout
        return layout

    def count(self, **counters: int) -> None:
        """Add to the ring's progress counters."""
        self._ring.count(**counters)

    def close(self) -> None:
        """Say that nothing follows."""
        self._ring.close()

    def _writer_lives(self) -> bool:
        try:
            os.kill(self._writer_pid, 0)
        except ProcessLookupError:
            return False
        return True
