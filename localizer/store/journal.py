"""The journal of a capture: one line for each finished shard."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from localizer.store.schema import JOURNAL, Shard


def append_journal(folder: Path, shard: Shard) -> None:
    """Add one line to the journal and make it durable."""
    with (folder / JOURNAL).open("ab") as handle:
        handle.write(msgspec.json.encode(shard) + b"\n")
        handle.flush()
        os.fsync(handle.fileno())
