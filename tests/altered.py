"""Captures that somebody altered, described anew so that journal and manifest still agree with the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from builders import Plan, write

from localizer.store import tensors

SMALL = Plan(layers=1, prompts=((1, 2), (3, 4)), matrix=(1, 2), max_tokens=2)
"""A complete capture of 9 rows at 9 sites with all payload."""

ROWS, DIGESTS, PAYLOAD = (f"rank-0/{what}-00000.safetensors" for what in ("rows", "digests", "payload"))


def small(root: Path, **changes: Any) -> Path:
    """Write SMALL, changed as said, and return its folder."""
    return write(root, replace(SMALL, **changes))


def edit(folder: Path, document: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON document in place and describe it anew."""
    path = folder / document
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    if document != "manifest.json":
        describe(folder)


def forge(
    folder: Path,
    shard: str,
    *,
    arrays: Mapping[str, np.ndarray | None] | None = None,
    metadata: str | None = None,
) -> None:
    """Replace tensors of a shard (None takes one away) or its metadata, and describe it anew."""
    file = tensors.TensorFile(folder / shard)
    table = {name: np.array(file.array(name)) for name in file.names()} | dict(arrays or {})
    kept = {name: array for name, array in table.items() if array is not None}
    tensors.write(folder / shard, kept, file.metadata if metadata is None else metadata)
    describe(folder)


def column(folder: Path, shard: str, name: str) -> np.ndarray:
    """A copy of a tensor of a shard."""
    return np.array(tensors.TensorFile(folder / shard).array(name))


def describe(folder: Path) -> None:
    """Write sizes and digests of all files into the journal and into the manifest, if there is one."""

    def now(record: dict[str, Any]) -> dict[str, Any]:
        path = folder / record["name"]
        return record | {"size": path.stat().st_size, "xxh3_128": tensors.file_digest(path)}

    journal = folder / "journal.jsonl"
    lines = [json.dumps(now(json.loads(line))) + "\n" for line in journal.read_text().splitlines()]
    journal.write_text("".join(lines))
    path = folder / "manifest.json"
    if path.exists():
        manifest = json.loads(path.read_text())
        manifest["files"] = [now(record) for record in manifest["files"]]
        path.write_text(json.dumps(manifest))
