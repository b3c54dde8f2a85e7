"""Which model is meant by `--model`: a built-in one, a folder, or a hub name for vLLM to find."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from localizer.cache import cache_folder
from localizer.errors import LocalizerError
from localizer.store.tensors import file_digest
from localizer.workload import tiny

TINY, TINY_DRAFT = "tiny", "tiny-eagle3"
BUILT_IN = {TINY: tiny.build_tiny, TINY_DRAFT: tiny.build_tiny_draft}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HASHED = frozenset({".json", ".safetensors", ".bin", ".gguf", ".model"})


@dataclass(frozen=True)
class ResolvedModel:
    """A model as named, as vLLM is given it, and the digests of its local files (xxh3-128, hex)."""

    name: str
    path: str
    files: dict[str, str]


def resolve(name: str) -> ResolvedModel:
    """Find the model called `name`, building a built-in one at its first use.

    Raises:
        LocalizerError: it is neither built in, nor a folder with a config.json, nor shaped like a hub name.
    """
    if name in BUILT_IN:
        folder = cache_folder() / "models" / f"{name}-{tiny.SEED}"
        BUILT_IN[name](folder)
        return ResolvedModel(name, str(folder), digests(folder))
    folder = Path(os.path.expanduser(name))
    if (folder / "config.json").is_file():
        return ResolvedModel(name, str(folder.resolve()), digests(folder))
    if folder.exists():
        raise LocalizerError(f"{name} holds no config.json; name the folder of a model, or {TINY!r}.")
    if HUB_NAME.fullmatch(name):
        return ResolvedModel(name, name, {})
    raise LocalizerError(
        f"There is no model {name!r}; name a model's folder, a hub name (org/model), or {TINY!r}."
    )


def digests(folder: Path) -> dict[str, str]:
    """xxh3-128 of the files that make a model what it is: configuration and weights."""
    return {
        path.name: file_digest(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in HASHED
    }
