"""A bounded wait for the files of a capture, which a shared file system may show late."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from localizer.errors import LocalizerError
from localizer.store import schema
from localizer.store.schema import Shard

VARIABLE = "LOCALIZER_FILE_WAIT"
"""Environment variable: how long to wait, in seconds."""

DEFAULT = 30.0

_PAUSE = 0.05


def patience() -> float:
    """Seconds to wait for files.

    Raises:
        LocalizerError: the environment variable is no such number.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return DEFAULT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (0 <= seconds < math.inf):
        raise LocalizerError(f"{VARIABLE}={text!r} is no number of seconds; write for example {VARIABLE}=60.")
    return seconds


def for_shards(folder: Path, journal: int) -> None:
    """Wait until the journal has `journal` bytes and the files that it lists have their sizes.

    Raises:
        LocalizerError: they were not there in time; the message names the first.
    """
    _wait(folder, lambda: _short(folder / schema.JOURNAL, journal) or _shards(folder))


def for_manifest(folder: Path) -> None:
    """Wait until the manifest and the files that the journal lists are there, with their sizes.

    Raises:
        LocalizerError: they were not there in time; the message names the first.
    """
    _wait(folder, lambda: _short(folder / schema.MANIFEST, 1) or _shards(folder))


def _wait(folder: Path, missing: Callable[[], str]) -> None:
    """Wait until nothing is missing."""
    deadline = time.monotonic() + patience()
    pause = _PAUSE
    while name := missing():
        if time.monotonic() >= deadline:
            raise LocalizerError(
                f"{folder} lacks {name} after {patience():g} seconds; if its file system shows files late, "
                f"wait longer with {VARIABLE}=SECONDS, or name another folder with --out."
            )
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, 1.0)


def _short(path: Path, size: int) -> str:
    """The name of a file that is not there or is shorter than `size` bytes; else empty."""
    try:
        return path.name if os.stat(path).st_size < size else ""
    except (OSError, ValueError):  # a name that no file can have
        return path.name


def _shards(folder: Path) -> str:
    """The first listed file that is not there with its size; empty if all are."""
    try:
        lines = (folder / schema.JOURNAL).read_bytes().splitlines(keepends=True)
    except OSError:
        return schema.JOURNAL
    for line in lines:
        try:
            shard = schema.parse(line, Shard)
        except ValueError:
            if not line.endswith(b"\n"):
                return schema.JOURNAL  # not all of it is seen yet
            continue  # damaged, which readers say better
        if _short(folder / shard.name, shard.size):
            return shard.name
    return ""
