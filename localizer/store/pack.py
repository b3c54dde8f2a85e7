"""Writing archives: zip files of which the same contents give the same bytes."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash

CHECKSUMS = "checksums.txt"
WHEN = (1980, 1, 1, 0, 0, 0)
LEVEL = 6
ALGORITHMS = ("SHA256", "XXH128")
_LINE = re.compile(r"(SHA256|XXH128) \((.+)\) = ([0-9a-f]{32,64})")

Members = Mapping[str, bytes | Path]
"""What goes into an archive, or where it lies, by name."""


def write(path: Path, members: Members) -> None:
    """Write an archive of `members`, in the given order, and their checksums; whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            lines = []
            for name, content in members.items():
                blob = content if isinstance(content, bytes) else content.read_bytes()
                lines += checksums(name, blob)
                _add(archive, name, blob)
            _add(archive, CHECKSUMS, "".join(lines).encode())
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _add(archive: zipfile.ZipFile, name: str, blob: bytes) -> None:
    info = zipfile.ZipInfo(name, WHEN)
    info.create_system = 3  # Unix, whatever this is: the permissions are its
    info.external_attr = (stat.S_IFREG | 0o644) << 16
    archive.writestr(info, blob, zipfile.ZIP_DEFLATED, LEVEL)


def digests(pieces: Iterable[bytes]) -> dict[str, str]:
    """SHA-256 and xxh3-128 of a member in hex, by the names that their tools give them."""
    sha, xxh = hashlib.sha256(), xxhash.xxh3_128()
    for piece in pieces:
        sha.update(piece)
        xxh.update(piece)
    return dict(zip(ALGORITHMS, (sha.hexdigest(), xxh.hexdigest()), strict=True))


def checksums(name: str, blob: bytes) -> list[str]:
    """The lines of a member, as `sha256sum --tag` and `xxhsum --tag` write them."""
    return [f"{algorithm} ({name}) = {digest}\n" for algorithm, digest in digests([blob]).items()]


def parse(text: str) -> dict[tuple[str, str], str]:
    """The checksums in such lines, by algorithm and name.

    Raises:
        ValueError: a line is none of them, or comes twice.
    """
    found: dict[tuple[str, str], str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None or (match[1], match[2]) in found:
            raise ValueError(f"line {number} is no checksum, or one that came before")
        found[match[1], match[2]] = match[3]
    return found
