"""The thread that takes what has arrived on the host to the ring, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Pump(Generic[T]):
    """Calls `handle` for each thing that is put, in order, in a thread of its own.

    After a fault nothing more is handled, but all that is put is still given to `drop`, so that nobody waits.

    Attributes:
        error: the fault, or None.
    """

    def __init__(self, handle: Callable[[T], None], drop: Callable[[T], None]) -> None:
        self._handle, self._drop = handle, drop
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="localizer-pump", daemon=True)
        self._thread.start()

    def put(self, thing: T) -> None:
        """Handle this after all that was put before.

        Raises:
            RuntimeError: something could not be handled.
        """
        self.check()
        self._queue.put(thing)

    def check(self) -> None:
        """Raise the fault in the caller's thread, if there was one."""
        if self.error is not None:
            raise RuntimeError(f"{type(self.error).__name__}: {self.error}") from self.error

    def close(self, patience: float) -> None:
        """Wait until everything is handled.

        Raises:
            RuntimeError: something could not be handled, or it takes longer than `patience` seconds.
        """
        self._queue.put(None)
        self._thread.join(patience)
        self.check()
        if self._thread.is_alive():
            raise RuntimeError(f"what was recorded did not reach the writer within {patience:.0f} seconds")

    def _work(self) -> None:
        while (thing := self._queue.get()) is not None:
            if self.error is None:
                try:
                    self._handle(thing)
                except Exception as error:  # the engine's thread tells it
                    self.error = error
            self._drop(thing)
