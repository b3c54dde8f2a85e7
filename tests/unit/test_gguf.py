"""Reading GGUF: a file written here by the format's description."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from localizer.workload.gguf import BLOCK, F32, Q4_1, Q8_0, GgufFile

UNKNOWN = 2  # Q4_0


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def file(
    path: Path, metadata: list[tuple[str, int, bytes]], tensors: list[tuple[str, tuple[int, ...], int, bytes]]
) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, kind, value in metadata:
        head += text(key) + struct.pack("<I", kind) + value
    data = b""
    for name, shape, kind, body in tensors:
        data += bytes(-len(data) % 32)
        dimensions = b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += text(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, len(data))
        data += body
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def test_metadata(tmp_path: Path) -> None:
    found = GgufFile(
        file(
            tmp_path / "m.gguf",
            [
                ("name", 8, text("Zoë")),
                ("count", 4, struct.pack("<I", 30)),
                ("epsilon", 6, struct.pack("<f", 0.5)),
                ("flag", 7, b"\1"),
                ("tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
                ("nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 0, 2) + b"\3\4"),
            ],
            [],
        )
    ).metadata
    assert found == {
        "name": "Zoë", "count": 30, "epsilon": 0.5, "flag": True, "tokens": ["a", "b"], "nested": [[3, 4]],
    }  # fmt: skip


def test_tensors(tmp_path: Path) -> None:
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    signed = np.arange(-BLOCK, BLOCK).astype(np.int8)
    bytes8 = b"".join(
        struct.pack("<e", scale) + signed[at : at + BLOCK].tobytes() for scale, at in ((0.5, 0), (2, BLOCK))
    )
    nibbles = (np.arange(BLOCK) * 7 % 16).astype(np.uint8)
    packed = nibbles[: BLOCK // 2] | nibbles[BLOCK // 2 :] << 4
    bytes4 = struct.pack("<ee", 0.25, -3) + packed.tobytes()
    found = GgufFile(
        file(
            tmp_path / "m.gguf",
            [],
            [
                ("plain", (2, 3), F32, plain.tobytes()),
                ("q8", (2, BLOCK), Q8_0, bytes8),
                ("q4", (1, BLOCK), Q4_1, bytes4),
            ],
        )
    )
    assert found.array("plain").tolist() == plain.tolist()
    assert found.array("q8").tolist() == [
        (signed[:BLOCK] * 0.5).tolist(), (signed[BLOCK:] * 2.0).tolist(),
    ]  # fmt: skip
    assert found.array("q4").tolist() == [(nibbles * 0.25 - 3).tolist()]


def test_what_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(ValueError, match="other is no GGUF file of version 3"):
        GgufFile(tmp_path / "other")
    found = GgufFile(file(tmp_path / "m.gguf", [], [("q", (1, BLOCK), UNKNOWN, bytes(18))]))
    with pytest.raises(ValueError, match="q is of GGUF type 2"):
        found.array("q")
    with pytest.raises(ValueError, match="unknown type 99"):
        GgufFile(file(tmp_path / "n.gguf", [("key", 99, b"")], []))
