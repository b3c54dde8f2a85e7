"""What the parent process makes of what it hears; doubles stand in for the children."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localizer.capture import session as module
from localizer.capture.finish import Heard
from localizer.errors import CaptureFailed


class Silent:
    """Progress that nobody watches."""

    def phase(self, text: str) -> None:
        """Say nothing."""

    def advance(self, rounds: int, of: int, steps: int, tokens: int) -> None:
        """Say nothing."""


def watching(heard: list[tuple[str, dict[str, Any] | None]]) -> Any:
    """A session whose source lives and whose children have said what is in `heard`."""
    session = object.__new__(module._Session)
    session._progress, session._folder, session._heard = Silent(), Path("captures/x/0001"), Heard()
    session._source = SimpleNamespace(poll=lambda: None, pid=0)  # type: ignore[assignment]
    session._opening = SimpleNamespace(workload=SimpleNamespace(matrix=[1], repeats=1))  # type: ignore[assignment]
    session._shared = SimpleNamespace(look=lambda group: None)  # type: ignore[assignment]
    session._rings = [SimpleNamespace(progress=(0, 0, 0))]  # type: ignore[list-item]
    session._queue = module.queue.Queue()
    for item in heard:
        session._queue.put(item)
    return session


def test_the_writer_may_be_done_before_the_source_has_said_so() -> None:
    session = watching([(0, {"event": "written"}), (0, None), ("source", {"event": "done"})])
    session._watch()
    assert session._heard.written == {0: {"event": "written"}}
    assert session._heard.done == {"event": "done"}


@pytest.mark.parametrize("last", [None, {"event": "failed", "what": "stream", "reason": "it broke"}])
def test_a_writer_that_fails_ends_the_capture(last: dict[str, Any] | None) -> None:
    with pytest.raises(CaptureFailed, match=r"ended early \((it was killed|it broke)\)"):
        watching([(0, last)])._watch()


def test_errors_of_the_system_are_told_apart(tmp_path: Path) -> None:
    full = module._failed(tmp_path, OSError(errno.ENOSPC, "No space left on device"))
    assert "free some space or name another folder with --out" in str(full)
    busy = module._failed(tmp_path, OSError(errno.EAGAIN, "Resource temporarily unavailable"))
    assert "was stopped by the operating system (Resource temporarily unavailable)" in str(busy)
