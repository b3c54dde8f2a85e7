"""Values that a message of the worker holds before they have arrived on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

PATIENCE = 120.0
"""Seconds for which a value, or room for rows, is waited for."""


class Later:
    """A value that arrives later, perhaps from another thread.

    Attributes:
        ask: makes it arrive, called by whoever waits for it; None where it comes by itself.
    """

    def __init__(self, convert: Callable[[Any], Any] | None = None) -> None:
        self.ask: Callable[[], object] | None = None
        self._convert = convert
        self._arrived = threading.Event()
        self._value: Any = None
        self._failed = ""

    def arrive(self, value: Any) -> None:
        """The value is there."""
        self._value = value if self._convert is None else self._convert(value)
        self._arrived.set()

    def fail(self, reason: str) -> None:
        """The value will not come."""
        self._failed = reason
        self._arrived.set()

    def get(self, patience: float) -> Any:
        """Wait for the value.

        Raises:
            RuntimeError: it did not come.
        """
        if self.ask is not None:
            self.ask()
        if not self._arrived.wait(patience):
            raise RuntimeError(f"the tokens of a step did not come within {patience:.0f} seconds")
        if self._failed:
            raise RuntimeError(self._failed)
        return self._value


def resolved(content: dict[str, Any], patience: float) -> dict[str, Any]:
    """A message with every value in it that comes later, once they are there."""
    return {
        name: value.get(patience) if isinstance(value, Later) else value for name, value in content.items()
    }
