"""Starting and ending child processes, each the head of its own process group."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import localizer
from localizer.capture import leftovers

GRACE = 10.0
"""Seconds between asking a process group to end and killing it."""

DYING = 5.0
"""Seconds that killed processes may take to give back what they hold."""


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command as the head of a new session: a Ctrl-C in the terminal reaches localize alone."""
    return subprocess.Popen(
        command,
        env=dict(environment),
        pass_fds=pass_fds,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def start_writer(ring_fd: int, folder: Path, rank: int) -> subprocess.Popen[bytes]:
    """Start a rank's writer in localizer's own interpreter, on its ring and the capture in `folder`."""
    package = str(Path(localizer.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return start(
        [sys.executable, "-m", "localizer.capture.writer", str(ring_fd), str(folder), str(rank)],
        {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        pass_fds=[ring_fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def end_group(process: subprocess.Popen[bytes], grace: float = GRACE) -> int:
    """End a process and everything in its group; return the exit status of the process."""
    _signal_group(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and (process.poll() is None or group_lives(process.pid)):
        time.sleep(0.05)
    _signal_group(process.pid, signal.SIGKILL)
    status = process.wait()
    deadline = time.monotonic() + DYING
    while leftovers.members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return status


def group_lives(group: int) -> bool:
    """Whether any process of the group is left."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def pump(
    stream: IO[bytes], name: str | int, into: queue.Queue[tuple[str | int | None, dict[str, Any] | None]]
) -> threading.Thread:
    """Read JSON lines from `stream` into a queue as (name, object), and (name, None) at its end."""

    def work() -> None:
        with stream:
            for line in stream:
                with contextlib.suppress(ValueError):
                    into.put((name, json.loads(line)))
        into.put((name, None))

    thread = threading.Thread(target=work, name=f"localizer-{name}", daemon=True)
    thread.start()
    return thread
