"""Files that a person names for what localizer makes: nothing that it reads, and no strange file, is lost."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from localizer.errors import LocalizerError
from localizer.store import archive, names, pack, tensors


def write(path: Path, blob: bytes) -> None:
    """Replace a file whole, or none of it; a link is followed, and a device or a pipe is written to.

    Raises:
        OSError: it cannot be written.
    """
    there = path.resolve()
    if there.exists() and not there.is_file():
        with there.open("wb") as handle:
            handle.write(blob)
        return
    try:
        tensors.replace(there, blob)
    except OSError as error:  # which names a file beside it
        raise OSError(error.errno, error.strerror, str(path)) from None


def spare(path: Path, root: Path, captures: Iterable[str]) -> None:
    """Check that a file to be written is no part of captures that are to be read.

    Args:
        path: of the file.
        root: folder of the captures.
        captures: as a person names them.

    Raises:
        LocalizerError: it is, or one of them is not there.
    """
    there = path.resolve()
    for name in captures:
        inside = archive.find(root, name)
        taken = (inside[0] if inside is not None else names.find(root, name)).resolve()
        if there == taken or taken in there.parents:
            raise LocalizerError(f"{path} belongs to {name}, which is to be read; name another file with -o.")


def replaceable(path: Path) -> None:
    """Check that a file which an archive is to replace is one of localizer's own.

    Raises:
        LocalizerError: it is another.
    """
    if path.is_file():
        try:
            ours = pack.CHECKSUMS in archive.Archive(path).members
        except LocalizerError:
            ours = False
        if not ours:
            raise LocalizerError(f"{path} is there and no archive of localizer; name another with -o.")
