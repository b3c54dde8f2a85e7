"""From tensors to frames of the ring."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import torch

from localizer.wire.ring import MESSAGE, ROWS, Ring


class Sink:
    """The producing end of the ring, for tensors on the CPU."""

    def __init__(self, ring: Ring, writer_pid: int) -> None:
        self._ring = ring
        self._writer_pid = writer_pid
        self._bytes = torch.frombuffer(ring.buffer, dtype=torch.uint8)
        self._layouts: dict[int, tuple[torch.dtype, torch.Size]] = {}
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
        shape = tensor.shape[1:]
        if tensor.shape[0] < count:  # copy_ would repeat a single row
            raise ValueError(f"a tensor of {tensor.shape[0]} rows came where {count} are scheduled")
        if self._layouts.get(site) != (tensor.dtype, shape):
            name = str(tensor.dtype).removeprefix("torch.")
            self.message(type="layout", site=site, dtype=name, shape=list(shape))
            self._layouts[site] = (tensor.dtype, shape)
        width = math.prod(shape) * tensor.element_size()
        step = max(1, self._largest // max(width, 1))
        for first in range(0, count, step):
            many = min(step, count - first)
            offset = self._ring.reserve(ROWS, many * width, (site, first, many), alive=self._writer_lives)
            target = self._bytes[offset : offset + many * width].view(tensor.dtype).view(many, *shape)
            target.copy_(tensor[first : first + many])
            self._ring.commit()

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
