"""Where tensors lie in a buffer that carries them from the device to the host; nothing but numbers.

A buffer is filled from its start. Its contents are told in order, as items: a message; a value that a message
waits for; or a run, rows of several tensors that lie one after the other and become one frame of the ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from localizer.wire.ring import ALIGN, ENTRY


@dataclass(frozen=True)
class Message:
    """A JSON object, some of whose values may arrive later."""

    content: dict[str, Any]


@dataclass(frozen=True)
class Value:
    """Elements that some message waits for: where they lie, their dtype and shape, and who waits."""

    later: Any
    offset: int
    size: int
    dtype: Any
    shape: tuple[int, ...]


@dataclass
class Run:
    """Rows between two offsets; `table` as `localizer.wire.ring.ROWS` says, counted from `begin`."""

    begin: int
    end: int
    table: list[int] = field(default_factory=list)


@dataclass
class Packing:
    """The contents of one buffer.

    Attributes:
        capacity: bytes of the buffer.
        longest: bytes after which a run is followed by another one.
        used: bytes taken so far.
        items: what lies in the buffer, in order.
    """

    capacity: int
    longest: int
    used: int = 0
    items: list[Message | Value | Run] = field(default_factory=list)

    def message(self, content: dict[str, Any]) -> None:
        """A message comes next."""
        self.items.append(Message(content))

    def place(self, size: int) -> int | None:
        """Take `size` bytes, and some even for nothing; their offset, or None if there is no room."""
        if self.used + max(size, 1) > self.capacity:
            return None
        offset = self.used
        self.used += -(-max(size, 1) // ALIGN) * ALIGN
        return offset

    def value(self, later: Any, size: int, dtype: Any, shape: tuple[int, ...]) -> int | None:
        """Take room for a value; its offset, or None if there is no room."""
        offset = self.place(size)
        if offset is not None:
            self.items.append(Value(later, offset, size, dtype, shape))
        return offset

    def rows(self, sites: Sequence[int], first: int, count: int, width: int) -> int | None:
        """Take room for `count` rows of `width` bytes of each site; their offset, None where none is left."""
        size = count * width
        offset = self.place(len(sites) * size)
        if offset is None:
            return None
        end = offset + len(sites) * size
        last = self.items[-1] if self.items else None
        if not isinstance(last, Run) or end - last.begin > self.longest:
            last = Run(offset, offset)
            self.items.append(last)
        for number, site in enumerate(sites):
            last.table += (site, first, count, width, width, offset - last.begin + number * size)
        last.end = end
        return offset


def pieces(count: int, width: int, most: int) -> Iterator[tuple[int, int]]:
    """Split `count` rows of `width` bytes into (first, count) of at most `most` bytes, one row at least."""
    step = max(1, most // max(width, 1))
    for first in range(0, count, step):
        yield first, min(step, count - first)


def entries(run: Run) -> int:
    """How many tensors a run has."""
    return len(run.table) // ENTRY
