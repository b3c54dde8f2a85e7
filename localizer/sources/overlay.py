"""An overlay: a folder whose `vllm/` files stand in for those of the installed package.

The source runs from a tree of symbolic links to the installed vLLM in which the changed files are replaced,
so its native libraries and generated files stay those of the installed package. One overlay keeps one tree:
vLLM's compile cache is keyed by the paths of the traced files, and a new path would compile everything again.
"""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash

from localizer.cache import cache_folder
from localizer.errors import LocalizerError
from localizer.store.tensors import file_digest

GENERATED = frozenset({"_version.py", "commit_id.py"})
"""Files that building vLLM writes; those of a checkout never stand in."""

NATIVE = frozenset({".so", ".pyd", ".dylib", ".pyc"})
"""Endings of built files, which stay those of the installed package."""


def lay(overlay: Path, installed: Path) -> tuple[Path, dict[str, str]]:
    """Make or refresh the tree of an overlay.

    Args:
        overlay: the folder with a `vllm/` tree.
        installed: the folder of the installed `vllm` package.

    Returns:
        The folder to put first on PYTHONPATH, and the replaced files: path below `vllm/` -> xxh3-128 in hex.

    Raises:
        LocalizerError: it has no `vllm/` folder, or nothing in it differs from the installed package.
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
    if not files:
        raise LocalizerError(
            f"No file of the overlay {overlay} differs from the vLLM in {installed}; nothing would change."
        )
    key = xxhash.xxh3_64_hexdigest(f"{overlay.resolve()}\0{installed.resolve()}".encode())
    tree = cache_folder() / "overlays" / key
    _link(installed, files, Path(), tree / "vllm")
    return tree, {str(name): file_digest(tree / "vllm" / name) for name in sorted(files)}


def stand_ins(changed: Path) -> Iterator[Path]:
    """Files of an overlay's `vllm/` folder that may stand in for installed ones."""
    for path in sorted(changed.rglob("*")):
        hidden = any(
            part == "__pycache__" or part.startswith(".") for part in path.relative_to(changed).parts
        )
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
