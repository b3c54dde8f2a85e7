"""Native code of a source that is not rebuilt: an overlay runs with the libraries of the installed vLLM."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from localizer.sources import git
from localizer.store.schema import Against, Native

NAMED = 20
"""Files that are recorded by name; beyond that only their number is."""

FOLDERS, FILES = ("csrc", "cmake"), ("CMakeLists.txt",)
SUFFIXES = frozenset({".cu", ".cuh", ".cpp", ".cc", ".c", ".h", ".hpp", ".hip", ".cmake"})
"""Where compiled code and what builds it lie in vLLM's repository; `setup.py` at its root as well."""

_PASSED_OVER = frozenset({"__pycache__", "build", "node_modules"})


def is_native(name: str) -> bool:
    """Whether a file, by its path from the root, is compiled or says what is."""
    parts = name.split("/")
    return (
        parts[0] in FOLDERS
        or parts[-1] in FILES
        or name == "setup.py"
        or os.path.splitext(parts[-1])[1] in SUFFIXES
    )


def of_overlay(overlay: Path, installed: Path, version: str) -> Native | None:
    """The native code that an overlay changes; None if there is none.

    Of a git checkout: the files that differ from the commit of the installed vLLM, or, where that is not in
    it, those with uncommitted changes. Of any other folder: all.

    Args:
        overlay: the folder with a `vllm/` tree.
        installed: the folder of the installed `vllm` package.
        version: of the installed vLLM.
    """
    overlay = overlay.resolve()
    tracked = _checkout(overlay)
    if tracked is None:
        return _native(_walk(overlay), "folder")
    if not any(map(is_native, tracked)):
        return _native(_untracked(overlay), "folder")
    base = installed_commit(overlay, installed, version)
    changed = git.changed(overlay, base or "HEAD")
    if changed is None:
        return Native(against="unknown", base=base or "", files=[], count=0)
    changed += _untracked(overlay)
    return _native(changed, "uncommitted" if base is None else "installed", base or _missing(version))


def of_revision(repository: Path, commit: str, installed: Path, version: str) -> Native | None:
    """The native code in which a commit differs from the installed vLLM; None if there is none."""
    tracked = git.names(repository, "ls-tree", "-r", "-z", "--name-only", "--full-tree", commit)
    if tracked is not None and not any(map(is_native, tracked)):
        return None
    base = installed_commit(repository, installed, version)
    if base is None:
        return Native(against="unknown", base=_missing(version), files=[], count=0)
    changed = git.names(repository, "diff-tree", "-r", "--no-renames", "--name-only", "-z", base, commit)
    if changed is None:
        return Native(against="unknown", base=base, files=[], count=0)
    return _native(changed, "installed", base)


def installed_commit(repository: Path, installed: Path, version: str) -> str | None:
    """What names the installed vLLM in a repository: its commit, or its version's tag, if there."""
    try:
        built = re.search(
            r"commit_id = '?g?([0-9a-f]{7,40})'?$", (installed / "_version.py").read_text(), re.M
        )
    except OSError:
        built = None
    if built and git.commit(repository, built[1]):
        return built[1]
    tag = _missing(version)
    return tag if git.commit(repository, f"refs/tags/{tag}") else None


def _missing(version: str) -> str:
    return f"v{version.partition('+')[0]}"


def _native(files: Iterable[str], against: Against, base: str = "") -> Native | None:
    found = sorted({name for name in files if is_native(name)})
    if not found and against != "uncommitted":
        return None
    return Native(against=against, base=base, files=found[:NAMED], count=len(found))


def _checkout(folder: Path) -> list[str] | None:
    """The tracked files of the git checkout whose root the folder is; None if it is none."""
    root = git.answer(folder, "rev-parse", "--show-toplevel")
    if root is None or Path(root.removesuffix("\n")) != folder or git.commit(folder, "HEAD") is None:
        return None
    return git.names(folder, "ls-files", "-z") or None


def _untracked(folder: Path) -> list[str]:
    return git.names(folder, "ls-files", "--others", "--exclude-standard", "-z") or []


def _walk(folder: Path) -> Iterator[str]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _PASSED_OVER and not name.startswith(".")]
        yield from (str((Path(where) / name).relative_to(folder)) for name in names)
