"""Reading a GGUF file, as far as a Llama in Q4_1 needs it.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Quantized types hold blocks of 32
values along a row: Q8_0 a float16 scale and 32 int8; Q4_1 a float16 scale, a float16 minimum and 32 nibbles,
the low ones of all 16 bytes first.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 32
"""Values of a quantized block."""

F32, Q4_1, Q8_0 = 0, 3, 8
STORED = {
    F32: (1, np.dtype("<f4")),
    Q4_1: (BLOCK, np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", BLOCK // 2)])),
    Q8_0: (BLOCK, np.dtype([("scale", "<f2"), ("values", "i1", BLOCK)])),
}
"""Type number -> values in a block, and how a block is stored."""

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True)
class Tensor:
    """A tensor as stored: `shape` slowest axis first, `start` counted from the beginning of the file."""

    shape: tuple[int, ...]
    type: int
    start: int


class GgufFile:
    """A GGUF file of version 3: `metadata` by key, `tensors` by name.

    Raises:
        ValueError: it is none, or needs what is not read here.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as handle:
            self._bytes = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        if self._bytes[:4] != b"GGUF" or struct.unpack_from("<I", self._bytes, 4) != (3,):
            raise ValueError(f"{path.name} is no GGUF file of version 3")
        self._at = 8
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        self.metadata = {self._text(): self._value(self._scalar("I")) for _ in range(pairs)}
        found = [(self._text(), self._described()) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        data = -(-self._at // alignment) * alignment
        self.tensors = {name: Tensor(shape, kind, data + start) for name, (shape, kind, start) in found}

    def array(self, name: str) -> np.ndarray:
        """A tensor's values as float32 [shape], dequantized."""
        tensor = self.tensors[name]
        if tensor.type not in STORED:
            raise ValueError(f"{name} is of GGUF type {tensor.type}, which is not read")
        block, stored = STORED[tensor.type]
        count = math.prod(tensor.shape) // block
        blocks = np.frombuffer(self._bytes, stored, count, tensor.start)
        if tensor.type == F32:
            return blocks.reshape(tensor.shape)
        scale = blocks["scale"].astype(np.float32)[:, None]
        if tensor.type == Q8_0:
            return (scale * blocks["values"]).reshape(tensor.shape)
        nibbles = np.hstack([blocks["nibbles"] & 15, blocks["nibbles"] >> 4]).astype(np.float32)
        return (scale * nibbles + blocks["minimum"].astype(np.float32)[:, None]).reshape(tensor.shape)

    def _described(self) -> tuple[tuple[int, ...], int, int]:
        dimensions = [self._scalar("Q") for _ in range(self._scalar("I"))]
        return tuple(reversed(dimensions)), self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            inner = self._scalar("I")
            return [self._value(inner) for _ in range(self._scalar("Q"))]
        if kind not in _SCALARS:
            raise ValueError(f"GGUF metadata of the unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _text(self) -> str:
        length = self._scalar("Q")
        self._at += length
        return self._bytes[self._at - length : self._at].decode("utf-8", "replace")

    def _scalar(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._bytes, self._at)
        self._at += struct.calcsize(kind)
        return value
