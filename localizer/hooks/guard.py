"""What keeps a fault of the observer from reaching vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from localizer.hooks.layout import CannotTap


class Guard:
    """Runs one part of the observer; an exception ends that part, is noted, and the run goes on.

    Args:
        ended: what the note begins with, e.g. "the schedule trace ended".
        errors: where the note goes.

    Attributes:
        broken: whether the part has ended.
    """

    def __init__(self, ended: str, errors: list[str]) -> None:
        self._ended, self._errors = ended, errors
        self.broken = False

    def stop(self, error: Exception) -> None:
        """Note what went wrong; the part does nothing more."""
        self.broken = True
        self._errors.append(f"{self._ended}: {type(error).__name__}: {error}")

    def __call__(self, action: Callable[..., None]) -> Callable[..., None]:
        """`action`, with any exception noted instead of raised, and skipped once something went wrong.

        Only `CannotTap` is raised: it refuses what was asked for, before anything is recorded.
        """

        @functools.wraps(action)
        def safely(*args: Any, **kwargs: Any) -> None:
            if self.broken:
                return
            try:
                action(*args, **kwargs)
            except CannotTap:  # said while the engine starts: it does not
                raise
            except Exception as error:  # whatever it is, the run must not change
                self.stop(error)

        return safely
