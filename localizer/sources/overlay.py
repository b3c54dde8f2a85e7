"""An overlay: a folder whose `vllm/` files stand in for those of the installed package.

The source runs from a tree of symbolic links to the installed vLLM in which the changed files are replaced,
so its native libraries and generated files stay those of the installed package. One overlay keeps one tree:
vLLM's compile cache is keyed by the paths of the traced files, and a new path would compile everything again.
"""

from __future__ import annotations

import fcntl
import filecmp
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from localizer.cache import cache_folder
from localizer.errors import LocalizerError
from localizer.store.tensors import file_digest

GENERATED = frozenset({"_version.py", "commit_id.py"})
"""Files that building vLLM writes; those of a checkout never stand in."""

NATIVE = frozenset({".so", ".pyd", ".dylib", ".pyc"})
"""Endings of built files, which stay those of the installed package."""


@dataclass(frozen=True)
class Laid:
    """An overlay that is laid out and stays as it is while `lock` is open.

    Attributes:
        tree: the folder to put first on PYTHONPATH.
        files: the replaced files: path below `vllm/` -> xxh3-128 in hex.
        lock: an open file that holds a shared lock on the tree.
    """

    tree: Path
    files: dict[str, str]
    lock: IO[bytes]


class InUse(LocalizerError):
    """A capture runs from the tree of an overlay that has changed since."""


def lay(overlay: Path, installed: Path, name: str = "", *, unchanged: bool = False) -> Laid:
    """Make or refresh the tree of an overlay.

    Args:
        overlay: the folder with a `vllm/` tree.
        installed: the folder of the installed `vllm` package.
        name: what it is called, where the person knows it by something else than its path.
        unchanged: whether it may differ nowhere from that.

    Raises:
        InUse: it has changed while a capture runs from its tree.
        LocalizerError: it has no `vllm/` folder, holds a linked folder, or differs nowhere from the installed
            package.
    """
    changed = overlay / "vllm"
    if not changed.is_dir():
        raise LocalizerError(
            f"The overlay {overlay} has no vllm/ folder; name the folder that contains vllm/."
        )
    files = {
        path.relative_to(changed): path
        for path in stand_ins(changed)
        if not _same(path, installed / path.relative_to(changed))
    }
    if not files and not unchanged:
        raise LocalizerError(
            f"No file of {name or f'the overlay {overlay}'} differs from the vLLM in {installed}; "
            "nothing would change."
        )
    key = xxhash.xxh3_64_hexdigest(f"{overlay.resolve()}\0{installed.resolve()}".encode())
    tree = cache_folder() / "overlays" / key
    tree.mkdir(parents=True, exist_ok=True)
    wanted = {str(name): file_digest(files[name]) for name in sorted(files)}
    lock = (tree / "lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _link(installed, files, Path(), tree / "vllm")
    except BlockingIOError:  # another capture runs from the tree, which is fine if it is as wanted
        fcntl.flock(lock, fcntl.LOCK_SH)
        if replaced(tree) != wanted:
            lock.close()
            raise InUse(
                f"The overlay {overlay} has changed while a capture runs from it; wait until that has ended."
            ) from None
    fcntl.flock(lock, fcntl.LOCK_SH)
    return Laid(tree, wanted, lock)


def replaced(tree: Path) -> dict[str, str]:
    """The files of a tree that are not links: path below `vllm/` -> xxh3-128 in hex."""
    found: dict[str, str] = {}
    for folder, folders, names in os.walk(tree / "vllm"):
        folders[:] = [name for name in folders if name != "__pycache__"]
        plain = [Path(folder) / name for name in names if not (Path(folder) / name).is_symlink()]
        found |= {str(path.relative_to(tree / "vllm")): file_digest(path) for path in plain}
    return dict(sorted(found.items()))


def stand_ins(changed: Path) -> Iterator[Path]:
    """Files of an overlay's `vllm/` folder that may stand in for installed ones.

    Raises:
        LocalizerError: a folder in it is a link, whose files would be passed over.
    """
    for path in sorted(changed.rglob("*")):
        hidden = any(
            part == "__pycache__" or part.startswith(".") for part in path.relative_to(changed).parts
        )
        if path.is_symlink() and path.is_dir() and not hidden:
            raise LocalizerError(f"{path} is a linked folder; an overlay needs the files themselves.")
        if path.is_file() and not hidden and path.name not in GENERATED and path.suffix not in NATIVE:
            yield path


def _same(left: Path, right: Path) -> bool:
    return right.is_file() and filecmp.cmp(left, right, shallow=False)


def _link(installed: Path, files: dict[Path, Path], where: Path, target: Path) -> None:
    """Lay one folder: real where files are replaced below it, links to the installed entries elsewhere."""
    if target.is_symlink() or target.is_file():
        target.unlink()
    target.mkdir(parents=True, exist_ok=True)
    here = {name.relative_to(where).parts[0] for name in files if name.is_relative_to(where)}
    there = {path.name for path in (installed / where).iterdir()} if (installed / where).is_dir() else set()
    wanted = (here | there) - {"__pycache__"}
    for stale in target.iterdir():
        if stale.name not in wanted and stale.name != "__pycache__":
            _remove(stale)
    for name in sorted(wanted):
        path, link = where / name, target / name
        if path in files:
            if link.is_symlink() or not _same(files[path], link):
                _remove(link)
                shutil.copy2(files[path], link)
        elif name in here:
            _link(installed, files, path, link)
        elif not link.is_symlink() or link.readlink() != installed / path:
            _remove(link)
            link.symlink_to(installed / path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
