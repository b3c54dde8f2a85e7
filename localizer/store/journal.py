"""The journal of a capture: one line for each finished shard."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec

from localizer.store.schema import JOURNAL, Shard


def append_journal(folder: Path, shard: Shard) -> None:
    """Add one line to the journal and make it durable.

    Several writers add to one journal: each line is written by one call at the end of the file, so that the
    kernel keeps them apart.

    Raises:
        OSError: the line could not be written, or not whole.
    """
    line = msgspec.json.encode(shard) + b"\n"
    with (folder / JOURNAL).open("ab", buffering=0) as handle:
        if handle.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / JOURNAL))
        os.fsync(handle.fileno())
