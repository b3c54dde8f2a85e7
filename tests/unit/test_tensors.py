"""Tensor files keep every byte of every dtype and shape, and a malformed one is refused in one sentence."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from localizer.errors import DamagedCapture
from localizer.store import tensors
from localizer.store.dtypes import NAME, NUMPY, itemsize

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    """An array of any dtype and of 0 to 3 dimensions, from arbitrary bytes: NaN payloads and all."""
    dtype = draw(st.sampled_from(sorted(NUMPY)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = int(np.prod(shape)) * itemsize(dtype)
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    if dtype == "bool":
        raw = raw & 1
    return dtype, raw.view(NUMPY[dtype]).reshape(shape)


@quick
@given(st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), arrays(), max_size=4))
def test_what_is_written_is_read(tmp_path: Path, table: dict[str, tuple[str, np.ndarray]]) -> None:
    path = tmp_path / "any.safetensors"
    size, digest = tensors.write(path, {name: array for name, (_, array) in table.items()}, '{"a": 1}')
    assert (size, digest) == (path.stat().st_size, tensors.file_digest(path))
    file = tensors.TensorFile(path)
    assert (set(file.names()), file.metadata) == (set(table), '{"a": 1}')
    for name, (dtype, array) in table.items():
        assert name in file
        assert (file.dtype(name), file.shape(name)) == (dtype, array.shape)
        assert (file.array(name).dtype, file.array(name).shape) == (NUMPY[dtype], array.shape)
        assert file.array(name).tobytes() == array.tobytes()


def test_arrays_that_are_not_contiguous_are_written_in_c_order(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.int16).reshape(4, 6)
    tensors.write(tmp_path / "a", {"cut": array[::2, 1::2], "turned": array.T}, "")
    file = tensors.TensorFile(tmp_path / "a")
    assert np.array_equal(file.array("cut"), array[::2, 1::2])
    assert np.array_equal(file.array("turned"), array.T)


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    table = {name: np.arange(3, dtype=np.float32) for name in "zab"}
    assert tensors.write(tmp_path / "a", table, "{}") == tensors.write(tmp_path / "b", table, "{}")


def test_arrays_are_read_only(tmp_path: Path) -> None:
    tensors.write(tmp_path / "a", {"x": np.zeros(3, np.float32)}, "")
    with pytest.raises(ValueError, match="read-only"):
        tensors.TensorFile(tmp_path / "a").array("x")[0] = 1
    blob = build({"a": entry("U8", [1], [0, 1]), "b": entry("F32", [1], [1, 5])}, bytes(5))
    (tmp_path / "odd").write_bytes(blob)
    with pytest.raises(ValueError, match="read-only"):
        tensors.TensorFile(tmp_path / "odd").array("b")[0] = 1


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "document"
    tensors.replace(path, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tensors.replace(path, b"new and longer")
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"document": b"old"}


def test_every_code_of_the_format_has_one_name() -> None:
    assert len(NAME) == len(NUMPY) == len(set(NAME.values()))
    assert {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}.items() <= NAME.items()
    assert [itemsize(name) for name in ("bfloat16", "float8_e5m2", "int64", "bool")] == [2, 1, 8, 1]


# -- hostile files ----------------------------------------------------------------------------------------


def build(header: object, body: bytes = b"", *, length: int | None = None, raw: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if raw is None else raw
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "empty": b"",
    "seven bytes": bytes(7),
    "no header": build(None, raw=b""),
    "header longer than the file": build({}, length=1 << 40),
    "header of the largest length": build({}, length=(1 << 64) - 1),
    "not JSON": build(None, raw=b"{not json}"),
    "not UTF-8": build(None, raw=b'{"\xff\xfe": 1}'),
    "UTF-16": build(None, raw="{}".encode("utf-16")),
    "NaN": build(None, raw=b'{"__metadata__": {}, "a": NaN}'),
    "header longer than any": build(None, raw=b" " * ((16 << 20) + 1)),
    "deep": build(None, raw=b"[" * 200_000),
    "deep in an entry": build(None, raw=b'{"a":' * 200_000),
    "a list": build([1, 2]),
    "a number of many digits": build(None, raw=b'{"a": ' + b"9" * 10_000 + b"}"),
    "a name twice": build(None, b"abcd", raw=b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2)),
    "a key of an entry twice": build(
        None, b"abcd", raw=b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}'
    ),
    "no tensors but bytes": build({}, b"abcd"),
    "metadata is a list": build({"__metadata__": []}),
    "metadata is not text": build({"__metadata__": {"localizer": 1}}),
    "entry is a number": build({"a": 4}, b"abcd"),
    "entry is null": build({"a": None}, b"abcd"),
    "unknown dtype": build({"a": entry("C64")}, b"abcd"),
    "dtype is a list": build({"a": entry(["U8"])}, b"abcd"),
    "dtype is an object": build({"a": entry({})}, b"abcd"),
    "dtype is null": build({"a": entry(None)}, b"abcd"),
    "no shape": build({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, b"abcd"),
    "shape is text": build({"a": entry(shape="4")}, b"abcd"),
    "negative size": build({"a": entry(shape=[-4])}, b"abcd"),
    "two negative sizes": build({"a": entry(shape=[-2, -2])}, b"abcd"),
    "size is a boolean": build({"a": entry(shape=[True, 4])}, b"abcd"),
    "size is a float": build({"a": entry(shape=[4.0])}, b"abcd"),
    "huge shape": build({"a": entry(shape=[1 << 62, 1 << 62])}, b"abcd"),
    "empty but huge": build({"a": entry(shape=[0, 1 << 62], offsets=[0, 0])}),
    "too many dimensions": build({"a": entry(shape=[1] * 60 + [4])}, b"abcd"),
    "shape and offsets disagree": build({"a": entry(shape=[3])}, b"abcd"),
    "dtype and offsets disagree": build({"a": entry("F32", [4])}, b"abcd"),
    "offsets backwards": build({"a": entry(offsets=[4, 0])}, b"abcd"),
    "negative offset": build({"a": entry(offsets=[-4, 0])}, b"abcd"),
    "three offsets": build({"a": entry(offsets=[0, 4, 4])}, b"abcd"),
    "no offsets": build({"a": entry(offsets=[])}, b"abcd"),
    "offsets are text": build({"a": entry(offsets="04")}, b"abcd"),
    "offsets beyond the file": build({"a": entry(offsets=[4, 8])}, b"abcd"),
    "offsets far beyond the file": build({"a": entry(offsets=[1 << 61, (1 << 61) + 4])}, b"abcd"),
    "overlap": build({"a": entry(), "b": entry(offsets=[2, 6])}, b"abcdef"),
    "the same bytes twice": build({"a": entry(), "b": entry()}, b"abcd"),
    "a hole before": build({"a": entry(offsets=[1, 5])}, b"abcde"),
    "a hole between": build({"a": entry(), "b": entry(offsets=[5, 9])}, b"abcdefghi"),
    "bytes left over": build({"a": entry()}, b"abcde"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_are_refused_in_one_sentence(tmp_path: Path, what: str) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(HOSTILE[what])
    with pytest.raises(DamagedCapture) as caught:
        tensors.TensorFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_long_name_is_not_repeated_whole(tmp_path: Path) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(build({"n" * 100_000: 1}))
    with pytest.raises(DamagedCapture) as caught:
        tensors.TensorFile(path)
    assert len(str(caught.value)) < 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(NAME)) | JSON,
        "shape": st.lists(st.integers(-2, 5), max_size=3) | JSON,
        "data_offsets": st.tuples(st.integers(-2, 20), st.integers(-2, 20)) | JSON,
    }
)


def reads_or_refuses(path: Path) -> None:
    """Either every tensor of the file can be read, or the file is refused."""
    try:
        file = tensors.TensorFile(path)
    except DamagedCapture:
        return
    for name in file.names():
        assert file.array(name).shape == file.shape(name)


@quick
@given(st.dictionaries(st.text(max_size=3), ENTRY | JSON, max_size=3), st.binary(max_size=20))
@example({"\ud800": 1}, b"")
def test_any_header_is_read_or_refused(tmp_path: Path, header: dict[str, Any], body: bytes) -> None:
    path = tmp_path / "any"
    path.write_bytes(build(header, body))
    reads_or_refuses(path)


@quick
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path: Path, blob: bytes) -> None:
    path = tmp_path / "any"
    path.write_bytes(blob)
    reads_or_refuses(path)


@pytest.fixture
def sound(tmp_path: Path) -> Callable[[], bytes]:
    table = {"query": np.arange(6, dtype=np.float32).reshape(2, 3), "rows": np.arange(2)}
    tensors.write(tmp_path / "sound", table, "{}")
    return (tmp_path / "sound").read_bytes


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, sound: Callable[[], bytes]) -> None:
    blob, path = sound(), tmp_path / "cut"
    for length in range(len(blob)):
        path.write_bytes(blob[:length])
        with pytest.raises(DamagedCapture):
            tensors.TensorFile(path)


def test_a_flipped_bit_in_any_byte_changes_the_digest(tmp_path: Path, sound: Callable[[], bytes]) -> None:
    blob, path = sound(), tmp_path / "flipped"
    digest = xxhash.xxh3_128_hexdigest(blob)
    for index in range(len(blob)):
        flipped = bytearray(blob)
        flipped[index] ^= 1 << index % 8
        path.write_bytes(flipped)
        reads_or_refuses(path)
        assert tensors.file_digest(path) != digest


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for change in (lambda: path.write_bytes(path.read_bytes()[:-8]), path.unlink):
        tensors.write(path, {"x": np.arange(4)}, "")
        file = tensors.TensorFile(path)
        change()
        with pytest.raises(DamagedCapture, match="cannot be read"):
            file.array("x")


def test_no_file_stays_open(tmp_path: Path) -> None:
    """A capture may have more files than a process may open."""

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    tensors.write(tmp_path / "file", {"x": np.arange(4)}, "")
    before = descriptors()
    files = [tensors.TensorFile(tmp_path / "file") for _ in range(20)]
    sums = [int(file.array("x").sum()) for file in files]
    assert (sums, descriptors()) == ([6] * 20, before)


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "pipe", "nothing"):
        with pytest.raises(DamagedCapture):
            tensors.TensorFile(tmp_path / name)
