"""Building a model's folder: whole or not at all, once, whoever else builds it at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SCRATCH = ".building-"
"""What the names of folders that are being built begin with."""


def is_built(folder: Path) -> bool:
    """Whether a model is there; half a model is none."""
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def build(folder: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill an empty folder, and put that into the place of `folder` unless a model is there.

    Of several processes one builds and the others wait for it. What a killed build left is removed.

    Raises:
        OSError: the disk is full or the place not writable.
    """
    if is_built(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent) as alone:
        if is_built(folder):
            return
        prefix = f"{SCRATCH}{folder.name}-"
        if alone:
            for left in folder.parent.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch:
            made = Path(scratch) / folder.name
            made.mkdir()
            write(made)
            if not is_built(folder):  # without a lock another process may have been faster
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the folder; False where its file system (NFS, for one) locks no folders."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(handle)
