"""Progress of a capture: a live line on a terminal, a line a phase elsewhere; on standard error."""

from __future__ import annotations

import time

from rich.console import Console
from rich.status import Status
from rich.text import Text


class ConsoleProgress:
    """Shows the phase under way, then rounds, steps and tokens."""

    def __init__(self, label: str) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._label = label
        self._phase = ""
        self._started = time.monotonic()
        self._status: Status | None = None

    def phase(self, text: str) -> None:
        """A phase begins."""
        self._phase = text
        if self._console.is_terminal:
            self._show(text)
        else:
            self._console.print(f"{self._label}: {text}", markup=False)

    def advance(self, rounds: int, of: int, steps: int, tokens: int) -> None:
        """Rounds finished, steps recorded, tokens returned so far."""
        if self._console.is_terminal:
            seconds = time.monotonic() - self._started
            counts = f"round {rounds}/{of}, {steps:,} steps, {tokens:,} tokens, " if steps or rounds else ""
            self._show(f"{self._phase} ({counts}{seconds:.0f} s)")

    def close(self) -> None:
        """Take the live line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _show(self, text: str) -> None:
        line = Text(f"{self._label}: {text}")
        if self._status is None:
            self._status = self._console.status(line)
            self._status.start()
        else:
            self._status.update(line)
