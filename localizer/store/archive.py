"""Reading archives of captures that came from a stranger: nothing in one may do harm.

An archive is a zip file: a folder for each capture, and plain files beside them, which are not looked into.
What its directory says is checked before anything is unpacked, and again against what comes out.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import struct
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localizer.errors import DamagedCapture, NotACapture
from localizer.store import pack, trace
from localizer.store.reader import SHARD_NAME, Capture
from localizer.store.schema import JOURNAL, LOG, MANIFEST, OPEN

MOST_MEMBERS = 10_000
MOST_DIRECTORY = 4 << 20
"""Bytes of the archive's directory."""

MOST_MEMBER = 1 << 30
MOST_TOTAL, MOST_RATIO = 64 << 20, 50
"""An archive may unpack to so many bytes, and so many times its own size more."""

DEFLATE_RATIO = 1040
"""Deflate makes nothing smaller than this; who says so lies."""

FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,49}", re.ASCII)
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
DOCUMENTS = (OPEN, JOURNAL, MANIFEST, LOG)

_END = struct.Struct("<4s4H2IH")
_LOCAL_HEADER = 30
_PIECE = 1 << 20

_unpacked: dict[str, str] = {}
"""Private folders into which archives were unpacked, with what a person calls them."""


class Archive:
    """An archive whose directory was found harmless.

    Raises:
        NotACapture: the file is not a zip file.
        DamagedCapture: it is one that localizer never writes; the message says why.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = os.fsencode(path).decode(errors="backslashreplace")
        start = self._check_end()
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, OverflowError) as error:
            raise self.damaged(f"its directory cannot be read ({str(error)[:80]})") from None
        why = _refused(members, path.stat().st_size, start)
        if why:
            raise self.damaged(why)
        self.members = {member.filename: member for member in members}

    def damaged(self, why: str) -> DamagedCapture:
        """What is said of the archive."""
        return DamagedCapture(f"{self.shown} is damaged or hostile: {why}; fetch the archive again.")

    def _check_end(self) -> int:
        """Check the record at the file's end, which says where the directory is; return its place."""
        if not self.path.is_file():
            raise NotACapture(f"{self.shown} is not a plain file; name an archive of captures.")
        with self.path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if handle.read(4) not in (b"PK\x03\x04", b"PK\x05\x06") or size < _END.size:
                raise NotACapture(
                    f"{self.shown} is not an archive of captures; name a capture, its folder, or an archive."
                )
            handle.seek(-_END.size, os.SEEK_END)
            mark, disk, first_disk, here, total, length, start, comment = _END.unpack(handle.read(_END.size))
        if mark != b"PK\x05\x06" or comment or disk or first_disk or here != total:
            raise self.damaged("it does not end as archives of localizer do")
        if start + length + _END.size != size:
            raise self.damaged("there is something before or behind its members")
        if total > MOST_MEMBERS or length > MOST_DIRECTORY:
            raise self.damaged(f"it has more than {MOST_MEMBERS:,} members, or names that are too long")
        return int(start)

    @property
    def captures(self) -> list[str]:
        """The folders that hold captures, in the archive's order."""
        return [name.rpartition("/")[0] for name in self.members if name.endswith(f"/{OPEN}")]

    @property
    def others(self) -> list[str]:
        """The plain files beside them."""
        return [name for name in self.members if "/" not in name]

    def blob(self, name: str, most: int) -> bytes:
        """The contents of a member of at most `most` bytes.

        Raises:
            DamagedCapture: it is longer, or not what the directory says.
        """
        if self.members[name].file_size > most:
            raise self.damaged(f"{name} is longer than {most:,} bytes")
        return b"".join(self.pieces(name))

    def pieces(self, name: str) -> Iterator[bytes]:
        """The contents of a member, piece by piece; never more than its directory says.

        Raises:
            DamagedCapture: it is not what the directory says.
        """
        size, member = 0, self.members[name]
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(member) as handle:
                while piece := handle.read(_PIECE):
                    size += len(piece)
                    if size > member.file_size:
                        break
                    yield piece
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, struct.error) as error:
            raise self.damaged(f"{name} cannot be unpacked ({str(error)[:80]})") from None
        if size != member.file_size:
            raise self.damaged(f"{name} does not have the size that the directory gives")

    def unpack(self, capture: str, folder: Path) -> Path:
        """Unpack one capture below `folder`, an empty and private one; return where it lies.

        Raises:
            DamagedCapture: a member is not what the directory says.
            OSError: the disk is full.
        """
        for name in self.members:
            if name.startswith(f"{capture}/"):
                path = folder / name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                with open(handle, "wb") as file:
                    file.writelines(self.pieces(name))
        return folder / capture

    def load(self, capture: str | None) -> Capture:
        """Open a capture, or the only one; it is unpacked for as long as the object lives.

        Raises:
            NotACapture: there is none of that name, or not exactly one.
            DamagedCapture, OSError: as `unpack`, and as `Capture`.
        """
        chosen = self._choose(capture)
        folder = Path(tempfile.mkdtemp(prefix="localizer-"))
        shown = f"{self.shown}:{chosen}"
        _unpacked[str(folder / chosen)] = shown
        try:
            found = Capture(self.unpack(chosen, folder), shown)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(found, shutil.rmtree, folder, ignore_errors=True)
        return found

    def _choose(self, capture: str | None) -> str:
        there = self.captures
        if capture in there:
            return capture
        if capture is None and len(there) == 1:
            return there[0]
        if not there:
            raise NotACapture(f"{self.shown} holds no captures; name an archive that localize attach made.")
        listed = ", ".join(f"{self.shown}:{name}" for name in there)
        if capture is None:
            raise NotACapture(f"{self.shown} holds several captures; name one: {listed}.")
        raise NotACapture(f"There is no capture {capture[:100]!r} in {self.shown}; there are: {listed}.")

    @contextmanager
    def opened(self, capture: str) -> Iterator[Capture]:
        """A capture that is unpacked until the end of the block; raises what `load` raises."""
        with tempfile.TemporaryDirectory(prefix="localizer-") as folder:
            shown = f"{self.shown}:{capture}"
            _unpacked[str(Path(folder) / capture)] = shown
            yield Capture(self.unpack(capture, Path(folder)), shown)


def named(sentence: str) -> str:
    """A sentence in which the private folders of unpacked captures have the names that people know."""
    for folder, shown in _unpacked.items():
        sentence = sentence.replace(folder, shown)
    return sentence


def find(root: Path, reference: str) -> tuple[Path, str | None] | None:
    """The archive that FILE or FILE:CAPTURE names, and the capture; None where there is no such file."""
    file, colon, capture = reference.rpartition(":")
    for base in (root, Path()):
        if (base / reference).is_file():
            return base / reference, None
        if colon and file and (base / file).is_file():
            return base / file, capture
    return None


def _refused(members: list[zipfile.ZipInfo], size: int, start: int) -> str:
    """Why localizer never writes such an archive; empty where it may."""
    seen, end, total = set[str](), 0, 0
    folders = {member.filename.partition("/")[0].casefold() for member in members if "/" in member.filename}
    for member in sorted(members, key=lambda member: member.header_offset):
        name = member.filename
        told = repr(name[:80])
        if member.orig_filename != name or not _may_be_called(name):
            return f"no member may be called {told}"
        if name.casefold() in seen or name.casefold() in folders:
            return f"{told} is there twice"
        seen.add(name.casefold())
        kind = member.external_attr >> 16
        if member.external_attr & 0x10 or (stat.S_IFMT(kind) not in (0, stat.S_IFREG)) or kind & 0o7111:
            return f"{told} is a link, a folder, executable or a special file"
        if member.flag_bits & 0x2061 or member.compress_type not in (
            zipfile.ZIP_STORED,
            zipfile.ZIP_DEFLATED,
        ):
            return f"{told} is encrypted or packed in an unknown way"
        if member.file_size > MOST_MEMBER or member.file_size > DEFLATE_RATIO * member.compress_size + 64:
            return f"{told} would unpack to {member.file_size:,} bytes"
        if member.compress_type == zipfile.ZIP_STORED and member.file_size != member.compress_size:
            return f"{told} has two sizes"
        if member.header_offset < end:
            return f"{told} overlaps another member"
        end = member.header_offset + _LOCAL_HEADER + len(name) + member.compress_size
        total += member.file_size
    if end > start:
        return "its members overlap its directory"
    if total > MOST_TOTAL + MOST_RATIO * size:
        return f"it would unpack to {total:,} bytes"
    return ""


def _may_be_called(name: str) -> bool:
    folder, slash, rest = name.partition("/")
    if not slash:
        return PLAIN.fullmatch(name) is not None
    inside = rest in DOCUMENTS or SHARD_NAME.fullmatch(rest) or trace.NAME.fullmatch(rest)
    return FOLDER.fullmatch(folder) is not None and bool(inside)


def check(archive: Archive) -> int:
    """Check every member against the archive's own checksums; return how many there are.

    Raises:
        DamagedCapture: a checksum is missing or wrong.
    """
    if pack.CHECKSUMS not in archive.members:
        raise archive.damaged(f"it has no {pack.CHECKSUMS}")
    try:
        listed = pack.parse(archive.blob(pack.CHECKSUMS, MOST_DIRECTORY).decode("ascii"))
    except ValueError as error:
        raise archive.damaged(f"{pack.CHECKSUMS} is malformed ({str(error)[:80]})") from None
    names = [name for name in archive.members if name != pack.CHECKSUMS]
    if set(listed) != {(algorithm, name) for name in names for algorithm in pack.ALGORITHMS}:
        raise archive.damaged(f"{pack.CHECKSUMS} is not of its members")
    for name in names:
        if pack.digests(archive.pieces(name)) != {it: listed[it, name] for it in pack.ALGORITHMS}:
            raise archive.damaged(f"{name} does not have its checksums")
    return len(names)
