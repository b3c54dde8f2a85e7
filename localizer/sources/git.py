"""Asking git about a repository, without writing anything into it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SECONDS = 10.0
"""How long git may take for one question."""

_PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")
"""Variables by which a git that runs localize, as a hook, would have its own repository asked instead."""


def ask(
    folder: Path, *arguments: str, given: bytes = b"", patient: bool = False, index: Path | None = None
) -> bytes:
    """What git prints when it is asked in `folder`; it may take `SECONDS`, or any time if `patient`.

    `index` is taken for the repository's own index.

    Raises:
        OSError: git cannot be run.
        subprocess.SubprocessError: it refuses, or does not answer in time.
    """
    environment = {key: value for key, value in os.environ.items() if key not in _PLACES}
    if index is not None:
        environment["GIT_INDEX_FILE"] = str(index)
    done = subprocess.run(
        ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],
        env=environment | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
        input=given,
        capture_output=True,
        timeout=None if patient else SECONDS,
        check=True,
    )
    return done.stdout


def answer(folder: Path, *arguments: str) -> str | None:
    """The same as text; None where git is not installed, refuses or does not answer in time."""
    try:
        return ask(folder, *arguments).decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None


def names(folder: Path, *arguments: str, index: Path | None = None) -> list[str] | None:
    """File names that git prints with `-z`; None as for `answer`."""
    try:
        found = ask(folder, *arguments, index=index)
    except (OSError, subprocess.SubprocessError):
        return None
    return [os.fsdecode(name) for name in found.split(b"\0") if name]


def commit(folder: Path, revision: str) -> str | None:
    """The commit that a revision names in the repository of `folder`; None if it names none."""
    found = answer(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", revision + "^{commit}")
    return found.strip() if found else None


def changed(folder: Path, revision: str) -> list[str] | None:
    """The tracked files in which the checkout of `folder` differs from a revision; None as for `answer`.

    `git diff` writes the index where files are unchanged but for their times, whatever GIT_OPTIONAL_LOCKS
    says (seen with git 2.39): it gets a copy, which is as old, for git looks into files that are not older.
    """
    place = answer(folder, "rev-parse", "--path-format=absolute", "--git-path", "index")
    if place is None:
        return None
    with tempfile.TemporaryDirectory(prefix="localizer-") as scratch:
        copy = Path(scratch) / "index"
        try:
            shutil.copy2(place.removesuffix("\n"), copy)
        except OSError:
            return None
        compared = ("diff", "--no-ext-diff", "--no-textconv", "--no-renames", "--name-only", "-z")
        return names(folder, *compared, revision, "--", index=copy)
