"""What a source really was: digests of the files its processes had loaded, and the state of its checkout.

The files are read by localizer's own interpreter when the run is over.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import xxhash

from localizer.sources import git
from localizer.store.schema import Checkout, Imported
from localizer.store.tensors import file_digest

UNREADABLE = ""
"""In place of the digest of a file that cannot be read any more."""


def digests(files: Mapping[str, str]) -> dict[str, str]:
    """xxh3-128 in hex by name, of files given as name -> path; empty where one cannot be read."""
    found = {}
    for name, path in sorted(files.items()):
        try:
            found[name] = file_digest(Path(path))
        except OSError:
            found[name] = UNREADABLE
    return found


def imported(files: Mapping[str, str], installed: Path) -> Imported:
    """The Python files of vLLM that were imported.

    Args:
        files: name below the package's parent, such as `vllm/config/model.py` -> path.
        installed: the folder of the installed `vllm` package, whose RECORD tells what was installed.
    """
    total = xxhash.xxh3_128()
    for name, digest in digests(files).items():
        total.update(f"{name} {digest}\n".encode())
    recorded = record(installed)
    changed = [
        name
        for name, path in sorted(files.items())
        if recorded and recorded.get(name, UNREADABLE) not in ("", _sha256(Path(path)))
    ]
    changed += sorted(name for name in files if recorded and name not in recorded)
    return Imported(files=len(files), digest=total.hexdigest(), changed=changed)


def listing(package: Path) -> str:
    """A digest of names, sizes and times of change of a package's files: quick, since it reads none of them.

    It tells that something was changed between two looks, also in an editable installation, which has no
    RECORD.
    """
    lines = []
    for folder, folders, names in os.walk(package):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
            except OSError:
                lines.append(f"{path}\n")
            else:
                lines.append(f"{path} {status.st_size} {status.st_mtime_ns}\n")
    return xxhash.xxh3_128_hexdigest(os.fsencode("".join(lines)))


def record(installed: Path) -> dict[str, str]:
    """sha256 (base64 for URLs, without padding) by name of a package's files as its RECORD lists them.

    Empty where there is no RECORD, as of an editable installation.
    """
    for path in sorted(installed.parent.glob(f"{installed.name}*.dist-info/RECORD")):
        try:
            with path.open(newline="") as lines:
                rows = [row for row in csv.reader(lines) if len(row) == 3]
        except (OSError, UnicodeDecodeError, csv.Error):
            continue
        found = {name: digest.removeprefix("sha256=") for name, digest, _ in rows}
        if f"{installed.name}/__init__.py" in found:
            return found
    return {}


def _sha256(path: Path) -> str:
    try:
        digest = hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return UNREADABLE
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def checkout(folder: Path) -> Checkout | None:
    """The commit of the git checkout that a folder lies in, and whether tracked files were changed since.

    None where it lies in none, git is not installed or does not answer. Nothing is written.
    """
    commit = git.answer(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    inside = git.answer(folder, "ls-files", "--", ".")
    if not inside:  # a folder inside another project's checkout is not its source
        return None
    status = git.answer(folder, "status", "--porcelain", "--untracked-files=no")
    return Checkout(commit=commit.strip(), dirty=None if status is None else bool(status.strip()))
