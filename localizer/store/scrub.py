"""Settings without what names a machine, a person or a place on a disk: what differed still differs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

ALLOWED = (
    *("VLLM_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "NCCL_", "OMP_", "MKL_", "KMP_", "OPENBLAS_"),
    *("ONEDNN_", "DNNL_", "ATEN_", "CUBLAS_", "FLASHINFER_"),
)
"""Beginnings of the names of environment variables that stay."""

PLACES = re.compile(r"(^|_)(HOST|HOSTNAME|IP|ADDR|ADDRESS|USER|SOCKET|IFNAME|URL|URI|SERVER|PROXY)(_|$)")
"""Names of variables that do not stay even so."""

OTHERS = "(others)"
"""In place of the variables that do not stay: how many there are, and a digest of them."""

_PATH = re.compile(
    r"""(?<![\w.>*~-])(?:~[\w.-]*)?/[^\s:;,'"()\[\]{}<>|=*?]+"""  # /home/me/models, ~me/models
    r"""|\\\\[^\s;,'"<>|]+"""  # \\server\share
    r"""|(?<!\w)[A-Za-z]:[\\/][^\s;,'"<>|]+"""  # C:\Users\me
)
_HOME = re.compile(r"(?:/home|/Users)/([^/\s:;,'\"]+)|[A-Za-z]:\\Users\\([^\\\s:;,'\"]+)|~([\w.-]+)/")
_DEEP = 4
"""Parts of a path from which on its last one stays: no home folder is so deep."""

GENERIC = frozenset({"root", "user", "vllm", "ubuntu", "ray", "runner", "jovyan", "app", "localhost"})
"""Names of accounts and machines that name nobody, and may be words of the records."""

Tag = Callable[[str], str]
"""Gives equal texts equal short names that do not tell what they stand for."""


class Scrubber:
    """Takes paths, and names of machines and people, out of texts.

    Equal texts stay equal and different ones different: each is replaced by a tag of its own.

    Args:
        tag: gives the tags.
        names: whole words that are replaced, such as the machine's name.
    """

    def __init__(self, tag: Tag, names: Iterable[str]) -> None:
        self._tag = tag
        found = sorted({re.escape(name) for name in names if name}, key=lambda name: (-len(name), name))
        self._names = re.compile(rf"(?<!\w)(?:{'|'.join(found)})(?!\w)") if found else None

    def text(self, text: str) -> str:
        """A text without them."""
        return self._words(self._paths(text))

    def tree(self, value: Any) -> Any:
        """A tree of plain values in which every text, keys too, is without them."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(key): self.tree(item) for key, item in value.items()}
        return [self.tree(item) for item in value] if isinstance(value, (list, tuple)) else value

    def values(self, table: Mapping[str, str]) -> dict[str, str]:
        """A table by names of sites or layers, whose values are without absolute paths."""
        return {key: self._paths(value) for key, value in table.items()}

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The variables that may be told, and that there were others."""
        told = {name: self.text(value) for name, value in variables.items() if _told(name)}
        others = {name: value for name, value in variables.items() if not _told(name)}
        if others:
            listed = "".join(f"{name}={value}\n" for name, value in sorted(others.items()))
            told[OTHERS] = f"{len(others)} not told {self._tag(listed)}"
        return told

    def _paths(self, text: str) -> str:
        whole = text.startswith("/") and len(text) > 1 and text.isprintable() and ":" not in text
        return self._path(text) if whole else _PATH.sub(lambda it: self._path(it[0]), text)

    def _path(self, path: str) -> str:
        parts = [part for part in re.split(r"[/\\]", path) if part]
        return f"<path {self._tag(path)}>" + (f"/{parts[-1]}" if len(parts) >= _DEEP else "")

    def _words(self, text: str) -> str:
        return text if self._names is None else self._names.sub(lambda it: f"<name {self._tag(it[0])}>", text)


def people(value: Any) -> set[str]:
    """Names of people that the paths in a tree of plain values tell: whose home folder they lead to."""
    if isinstance(value, str):
        return {name for found in _HOME.findall(value) for name in found if name}
    if isinstance(value, Mapping):
        return people([*value, *value.values()])
    return {name for item in value for name in people(item)} if isinstance(value, (list, tuple)) else set()


def _told(name: str) -> bool:
    return name.startswith(ALLOWED) and not PLACES.search(name)
