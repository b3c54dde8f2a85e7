"""A shared-memory ring of frames: one producer (a worker inside vLLM), one consumer (the writer process).

The ring lives in an anonymous memory file, so it disappears with the last process that maps it, however
that process ends. Counters only grow; an offset is a counter less the one at which its lap began. The
producer begins a lap where the consumer has made room at the start, long before the end is reached: so only
memory is used that is mapped and cached. Frames are contiguous and 64-byte aligned, so that tensors can be
copied straight into one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ALIGN = 64
CONTROL_BYTES = 4096
MAGIC = 0x4C4F43414C495A31  # "LOCALIZ1"

HOT_BYTES = 1 << 20
"""A lap is at least so long, if the ring is."""

LINGER_BYTES, LINGER_SECONDS = 1 << 20, 0.1
"""A consumer that has taken everything waits for so much more, or so long, before it begins again."""

WARM_BYTES = 16 << 20
"""So much of a ring is mapped before the first step; memory that is touched first in a step costs it time."""

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14, which Python does not name."""

# words of the control block
_MAGIC, _CAPACITY, _HEAD, _TAIL, _CLOSED, _FAILED, _ATTACHED, _STEPS, _ROWS, _DUMMY = range(10)

SKIP, MESSAGE, ROWS, BACK = 0, 1, 2, 3
"""Frame kinds: filler; a JSON message; rows of sites, and a table of them; the end of a lap.

The table consists of `ENTRY` signed 64-bit numbers for each tensor: site; index of its first row; count of
rows; bytes of a row; bytes from one row to the next; where its first row begins in the body. A row is in C
order. The frame's arguments are the number of tensors, and where the table begins in the body.
"""

ENTRY = 6

_FRAME = struct.Struct("<II7Q")  # kind, unused, body length in bytes, six arguments


class RingError(Exception):
    """The ring cannot take or give frames any more; the text says why."""


def create(capacity: int) -> int:
    """Make a ring of `capacity` bytes (rounded up to 64) and return its file descriptor.

    Linux only: the ring is an anonymous memory file, opened elsewhere as `/proc/<pid>/fd/<fd>`.
    """
    capacity = -(-capacity // ALIGN) * ALIGN
    fd = os.memfd_create("localizer-ring", os.MFD_CLOEXEC)
    os.ftruncate(fd, CONTROL_BYTES + capacity)
    with mmap.mmap(fd, CONTROL_BYTES) as control:
        struct.pack_into("<QQ", control, 0, MAGIC, capacity)
    return fd


def _size(length: int) -> int:
    """Bytes that a frame with a body of `length` bytes takes."""
    return ALIGN + -(-length // ALIGN) * ALIGN


@dataclass(frozen=True)
class Frame:
    """One frame as the consumer sees it; `body` is valid until the next `release`."""

    kind: int
    args: tuple[int, ...]
    body: memoryview


class Ring:
    """One end of a ring. The producer calls `reserve` and `commit`, the consumer `frames`.

    One end alone produces, and one alone consumes, from the first frame on: each knows where its lap began.
    """

    def __init__(self, path: str | int) -> None:
        fd = os.open(path, os.O_RDWR) if isinstance(path, str) else os.dup(path)
        try:
            self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        self.buffer = memoryview(self._map)
        self._words = self.buffer[:CONTROL_BYTES].cast("Q")
        if self._words[_MAGIC] != MAGIC:
            raise RingError("this is not a localizer ring")
        self.capacity = int(self._words[_CAPACITY])
        self._lock = threading.Lock()  # taking it is a full memory fence on weakly ordered processors
        self._head, self._room = int(self._words[_HEAD]), 0
        # counters at which the lap began that this end is in, and the one before; where that one ended
        self._lap = self._before = self._wall = 0

    # -- producer --------------------------------------------------------------------------------------

    def reserve(
        self, length: int, *, alive: Callable[[], bool] = lambda: True, patience: float = 120.0
    ) -> int:
        """Wait for room for a frame and return the byte offset of its body in `buffer`.

        Args:
            length: most bytes that the body will have; at most half the capacity, less the header.
            alive: says whether the consumer still runs; asked while waiting.
            patience: seconds without any progress of the consumer after which waiting ends.

        Raises:
            RingError: the frame cannot fit, the consumer is gone, failed, or makes no progress.
        """
        size = _size(length)
        if size > self.capacity // 2:
            raise RingError(f"a frame of {length} bytes does not fit a ring of {self.capacity} bytes")
        if self._words[_FAILED]:
            raise RingError("the writer has failed")
        if not self._fits(size):
            self._wait_for_room(size, alive, patience)
        self._room = length
        return CONTROL_BYTES + self._head - self._lap + ALIGN

    def commit(self, kind: int, length: int, args: tuple[int, ...] = ()) -> None:
        """Hand the reserved frame to the consumer.

        Args:
            kind: frame kind.
            length: bytes of the body, not more than were reserved.
            args: up to six unsigned integers carried in the frame header.
        """
        if length > self._room:
            raise ValueError(f"a frame of {length} bytes in room for {self._room}")
        self._put(kind, length, _size(length), args)
        self._room = 0

    def _put(self, kind: int, length: int, size: int, args: tuple[int, ...] = ()) -> None:
        """Write a header and go on by so many bytes."""
        offset = CONTROL_BYTES + self._head - self._lap
        _FRAME.pack_into(self._map, offset, kind, 0, length, *(*args, 0, 0, 0, 0, 0, 0)[:6])
        with self._lock:
            pass
        self._head += size
        self._words[_HEAD] = self._head

    def _fits(self, size: int) -> bool:
        """Go to where a frame of so many bytes may be written; False if there is no such place now."""
        at, tail = self._head - self._lap, self._words[_TAIL]
        if tail < self._lap and at < self._wall:
            # the consumer is in the lap before: what it has not taken yet lies from there to the wall
            if at + size < tail - self._before:
                return True
            if self._wall + size > self.capacity:
                return False
            self._put(SKIP, self._wall - at, self._wall - at)
            return True
        fits = at + size <= self.capacity
        if tail >= self._lap and size < tail - self._lap and (at > HOT_BYTES or not fits):
            if at < self.capacity:
                self._put(BACK, 0, ALIGN)
            self._before, self._lap = self._lap, self._head
            self._wall = self._lap - self._before
            return True
        return fits

    def _wait_for_room(self, size: int, alive: Callable[[], bool], patience: float) -> None:
        """Wait until a frame of so many bytes fits."""
        tail, deadline = self._words[_TAIL], time.monotonic() + patience
        while not self._fits(size):
            if self._words[_FAILED]:
                raise RingError("the writer has failed")
            if not alive():
                raise RingError("the writer is gone")
            if self._words[_TAIL] != tail:
                tail, deadline = self._words[_TAIL], time.monotonic() + patience
            elif time.monotonic() > deadline:
                raise RingError(f"the writer has taken nothing for {patience:.0f} seconds")
            time.sleep(0.0005)

    def close(self) -> None:
        """Say that no frame follows."""
        with self._lock:
            pass
        self._words[_CLOSED] = 1

    # -- consumer --------------------------------------------------------------------------------------

    def frames(
        self, stop: Callable[[], bool], pause: float = 0.02, linger: float = LINGER_SECONDS
    ) -> Iterator[Frame]:
        """Yield frames until the producer closed the ring, or `stop()` holds and the ring is empty.

        Args:
            stop: says whether nothing more will come.
            pause: seconds between looks at an empty ring.
            linger: seconds for which a little is left to become more. To begin costs the consumer, whose
                memory is not cached any more, about as much as a step's rows do.
        """
        enough = min(LINGER_BYTES, self.capacity // 8)
        while True:
            tail = self._words[_TAIL]
            if tail == self._words[_HEAD]:
                # closed and stop are read before the head is read again: nothing committed earlier is lost
                done = bool(self._words[_CLOSED]) or stop()
                if tail == self._words[_HEAD]:
                    if done:
                        return
                    until = time.monotonic() + linger
                    time.sleep(pause)
                    while self._words[_HEAD] - self._words[_TAIL] < enough and time.monotonic() < until:
                        if self._words[_CLOSED] or stop():
                            break
                        time.sleep(pause)
                    continue
            with self._lock:
                pass
            if tail - self._lap == self.capacity:
                self._lap = tail
            offset = CONTROL_BYTES + tail - self._lap
            kind, _, length, *args = _FRAME.unpack_from(self._map, offset)
            size = length if kind == SKIP else _size(length)
            if kind == BACK:
                self._lap = tail + size
            elif kind != SKIP:
                body = offset + ALIGN
                with self.buffer[body : body + length] as view:
                    yield Frame(kind, tuple(args), view)
            with self._lock:  # what was read was read before it may be overwritten
                pass
            self._words[_TAIL] = tail + size

    def fail(self) -> None:
        """Tell the producer that nothing more will be taken."""
        self._words[_FAILED] = 1

    # -- both and onlookers ----------------------------------------------------------------------------

    def attach(self) -> None:
        """Become the producer of the ring.

        Raises:
            RingError: there is one already.
        """
        if self._words[_ATTACHED]:
            raise RingError("the ring has a producer already")
        self._words[_ATTACHED] = 1

    def warm(self) -> None:
        """Map the first `WARM_BYTES` now, so that no step waits for it; does nothing on an older Linux."""
        size = min(len(self.buffer), CONTROL_BYTES + WARM_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):
            self._map.madvise(_POPULATE_WRITE, 0, size)

    def count(self, *, steps: int = 0, rows: int = 0, dummy: int = 0) -> None:
        """Add to the progress counters (producer only)."""
        self._words[_STEPS] += steps
        self._words[_ROWS] += rows
        self._words[_DUMMY] += dummy

    @property
    def progress(self) -> tuple[int, int, int]:
        """(steps, rows, dummy forwards) so far."""
        return int(self._words[_STEPS]), int(self._words[_ROWS]), int(self._words[_DUMMY])

    @property
    def attached(self) -> bool:
        return bool(self._words[_ATTACHED])

    def unmap(self) -> None:
        """Release the mapping; views handed out earlier must be gone."""
        self._words.release()
        with contextlib.suppress(BufferError):
            self.buffer.release()
            self._map.close()
