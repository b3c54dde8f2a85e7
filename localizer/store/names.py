"""Where captures live: `captures/NAME/NNNN`, each under its name's next number, nothing overwritten."""

from __future__ import annotations

import re
from pathlib import Path

from localizer.errors import LocalizerError, NotACapture
from localizer.store import archive
from localizer.store.reader import Capture
from localizer.store.schema import OPEN

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NUMBER = re.compile(r"\d{4,9}", re.ASCII)
RUNS = "runs"
"""The folder of `localize run`'s records, which therefore can name no capture."""


def new_folder(root: Path, name: str) -> tuple[Path, int]:
    """Make the next numbered folder of `name` under `root`; return it with its number.

    Raises:
        LocalizerError: the name is unusable or the folder cannot be made.
    """
    check_name(name)
    return next_folder(root, name)


def next_folder(root: Path, name: str) -> tuple[Path, int]:
    """Make the next numbered folder in `root/name`; return it with its number.

    Raises:
        LocalizerError: it cannot be made.
    """
    try:
        (root / name).mkdir(parents=True, exist_ok=True)
        number = max((int(folder.name) for folder in numbered(root / name)), default=0) + 1
        while True:
            folder = root / name / f"{number:04d}"
            try:
                folder.mkdir()
                return folder, number
            except FileExistsError:
                number += 1
    except OSError as error:
        raise unwritable(root, error) from None


def unwritable(folder: Path, error: OSError) -> LocalizerError:
    """What is said where a folder of captures cannot be written."""
    return LocalizerError(
        f"Captures cannot be written to {folder} ({error.strerror}); name a writable folder with --out."
    )


def check_name(name: str) -> None:
    """Check that `name` can name captures.

    Raises:
        LocalizerError: it cannot.
    """
    if name == RUNS:
        raise LocalizerError(f"{name!r} is where localize run keeps its records; take another name.")
    if not NAME.fullmatch(name) or re.fullmatch(r"\d{4,}", name):
        raise LocalizerError(
            f"{name!r} cannot name a capture; use letters, digits, '.', '_' and '-', and not digits alone."
        )


def numbered(folder: Path) -> list[Path]:
    """The numbered captures in the folder of a name, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NUMBER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name))


def names(root: Path) -> list[str]:
    """Names under `root` that hold at least one capture."""
    if not root.is_dir():
        return []
    return sorted(
        path.name
        for path in root.iterdir()
        if NAME.fullmatch(path.name) and any((item / OPEN).is_file() for item in numbered(path))
    )


def find(root: Path, reference: str) -> Path:
    """The folder of a capture named as NAME (the newest), NAME/NNNN or a path.

    Raises:
        NotACapture: nothing of that name; the names that exist are listed.
    """
    for base in (root / reference, Path(reference)):
        if (base / OPEN).is_file():
            return base
        captures = [folder for folder in numbered(base) if (folder / OPEN).is_file()]
        if captures:
            return captures[-1]
    there = names(root)
    listed = f"there are: {', '.join(there)}" if there else f"{root} holds no captures yet"
    raise NotACapture(f"There is no capture {reference!r}; {listed}.")


def load(root: Path, reference: str) -> Capture:
    """Open the capture named `reference`: as `find` finds it, or FILE.zip:CAPTURE, or FILE.zip if it has one.

    Raises:
        NotACapture, DamagedCapture: there is none, or it cannot be trusted.
    """
    inside = archive.find(root, reference)
    if inside is not None:
        path, capture = inside
        return archive.Archive(path).load(capture)
    return Capture(find(root, reference))
