"""Reading and writing safetensors files: strict about what is read, atomic about what is written.

The format is https://github.com/huggingface/safetensors#format: an 8-byte little-endian header length, a JSON
header, then the tensors' bytes without holes.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, TypeGuard

import numpy as np
import xxhash
from safetensors.numpy import save

from localizer.errors import DamagedCapture
from localizer.store import strict
from localizer.store.dtypes import NAME, NUMPY

METADATA = "localizer"
"""The one metadata key: JSON text (several keys would be written in no fixed order)."""

MAX_HEADER = 16 << 20
"""Longest header accepted, in bytes: taken apart it needs some 25 times as much memory."""

REMEMBERED_HEADER = 1 << 20
"""Longest header of which what it says is remembered, in bytes."""

MAX_DIMENSIONS, MAX_ELEMENTS = 16, 1 << 56
"""Largest tensor accepted."""


HASHED_AT_ONCE = 256 << 10
"""Bytes of a file that are read at a time: what stays in a processor's cache is hashed faster."""


@dataclass(frozen=True)
class File:
    """A file as the journal lists it: name relative to the capture, size in bytes, xxh3-128 as hex."""

    name: str
    size: int
    xxh3_128: str


def write(path: Path, tensors: Mapping[str, np.ndarray], metadata: str) -> tuple[int, str]:
    """Write `tensors` and JSON `metadata` to `path`, whole or not at all; return (bytes, xxh3-128 hex).

    Raises:
        OSError: the disk is full or the folder is not writable; the temporary file is removed.
    """
    blob = save({name: np.asarray(array, order="C") for name, array in tensors.items()}, {METADATA: metadata})
    replace(path, blob)
    return len(blob), xxhash.xxh3_128_hexdigest(blob)


def replace(path: Path, blob: bytes) -> None:
    """Write `blob` to `path` so that a reader sees the old file or the whole new one, whatever happens."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as handle:
            handle.write(blob)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


Entries = Mapping[str, tuple[str, tuple[int, ...], int, int]]
"""For each tensor torch's name of its dtype, its shape, and where its bytes begin and end in the file."""


@dataclass(frozen=True, eq=False)
class Header:
    """What a file says of its tensors; files of equal headers share one, as most sets of a capture do."""

    entries: Entries
    metadata: str


class TensorFile:
    """A safetensors file; `array(name)` maps a tensor into memory, nothing is read before it is used.

    No file stays open for longer than an array of it is in use: a capture may have more files than a process
    may open.

    Raises:
        DamagedCapture: the header is not JSON, or sizes, offsets, shapes or dtypes do not fit the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise self._unreadable("it is missing or not a plain file")
        try:
            with path.open("rb") as handle:
                self.header = self._parse(handle, os.fstat(handle.fileno()).st_size)
        except OSError as error:
            raise self._unreadable(error.strerror) from None
        self._entries, self.metadata = self.header.entries, self.header.metadata

    def _parse(self, handle: BinaryIO, total: int) -> Header:
        length = int.from_bytes(handle.read(8), "little")
        if not 0 < length <= min(total - 8, MAX_HEADER):
            raise self._damaged("its header length does not fit the file")
        header = handle.read(length)
        parse = _parsed if length <= REMEMBERED_HEADER else _parsed.__wrapped__
        try:
            return parse(header, total - 8 - length)
        except ValueError as error:
            raise self._damaged(str(error)) from None

    def _unreadable(self, why: str | None) -> DamagedCapture:
        return DamagedCapture(f"{self.path} cannot be read ({why}); fetch the capture again.")

    def _damaged(self, why: str) -> DamagedCapture:
        return DamagedCapture(f"{self.path} is damaged: {why}; fetch or make the capture again.")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Names of the tensors in the file."""
        return list(self._entries)

    def dtype(self, name: str) -> str:
        """torch's name of the dtype of tensor `name`."""
        return self._entries[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`."""
        return self._entries[name][1]

    def span(self, name: str) -> tuple[int, int]:
        """First byte of tensor `name` in the file, and the one behind its last."""
        return self._entries[name][2:]

    def row_bytes(self, name: str) -> int:
        """Bytes of a row of tensor `name`."""
        dtype, shape = self._entries[name][:2]
        return math.prod(shape[1:]) * NUMPY[dtype].itemsize

    def array(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A read-only view of tensor `name`, or of its rows [start, stop), in its own dtype.

        Raises:
            DamagedCapture: the file cannot be read any more.
        """
        dtype, shape, begin, end = self._entries[name]
        if stop is not None:
            width = self.row_bytes(name)
            shape, begin, end = (stop - start, *shape[1:]), begin + start * width, begin + stop * width
        if begin == end:
            empty = np.empty(shape, NUMPY[dtype])
            empty.flags.writeable = False
            return empty
        raw = self._mapped(begin, end)
        if begin % NUMPY[dtype].itemsize:
            raw = np.array(raw)
            raw.flags.writeable = False
        return raw.view(NUMPY[dtype]).reshape(shape)

    def memory(self) -> np.ndarray:
        """uint8 [bytes]: the whole file, mapped; `span` says where a tensor lies in it.

        Raises:
            DamagedCapture: the file cannot be read any more.
        """
        return self._mapped(0, max(entry[3] for entry in self._entries.values()))

    def _mapped(self, begin: int, end: int) -> np.ndarray:
        """Some bytes of the file, read-only."""
        aligned = begin - begin % mmap.ALLOCATIONGRANULARITY
        try:
            with self.path.open("rb", buffering=0) as handle:
                mapped = mmap.mmap(handle.fileno(), end - aligned, access=mmap.ACCESS_READ, offset=aligned)
        except (OSError, ValueError) as error:  # ValueError: the file became shorter
            raise self._unreadable(getattr(error, "strerror", None) or "it was changed") from None
        return np.frombuffer(mapped, np.uint8, end - begin, begin - aligned)


@lru_cache(maxsize=4)
def _parsed(header: bytes, rest: int) -> Header:
    """What a header says, before `rest` bytes of tensors.

    Raises:
        ValueError: it is malformed, or does not fit; the message says why.
    """
    try:
        found = strict.loads(header)
    except ValueError as error:
        raise ValueError(f"its header cannot be used, {error}") from None
    if not isinstance(found, dict):
        raise ValueError("its header is not a JSON object")
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is not text")
    entries, start = {}, 8 + len(header)
    spans = [(0, 0), (rest, rest)]
    for name, value in found.items():
        dtype, shape, begin, end = _entry(name, value)
        size = math.prod(shape) * NUMPY[dtype].itemsize
        if end - begin != size or end > rest:
            raise ValueError(f"the offsets of tensor {name[:80]!r} do not fit its shape or the file")
        entries[name] = (dtype, shape, start + begin, start + end)
        spans.append((begin, end))
    if any(left[1] != right[0] for left, right in itertools.pairwise(sorted(spans))):
        raise ValueError("its tensors overlap or leave holes")
    return Header(entries, metadata.get(METADATA, ""))


def _entry(name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """Name of the dtype, shape and offsets of a tensor."""
    if isinstance(entry, dict):
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        named = NAME.get(dtype) if isinstance(dtype, str) else None
        if named and is_shape(shape) and _are_sizes(offsets) and len(offsets) == 2:
            return named, tuple(shape), offsets[0], offsets[1]
    raise ValueError(f"the entry of tensor {name[:80]!r} is malformed")


def file_digest(path: Path) -> str:
    """xxh3-128 of a whole file, as hex.

    Raises:
        OSError: the file cannot be read.
    """
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(HASHED_AT_ONCE))
    with path.open("rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def is_shape(value: object) -> TypeGuard[list[int]]:
    """Whether numpy can have an array of this shape; even an empty one may not be arbitrarily long."""
    return (
        _are_sizes(value)
        and len(value) <= MAX_DIMENSIONS
        and math.prod(max(size, 1) for size in value) <= MAX_ELEMENTS
    )
