"""One table of dtypes: the name vLLM and torch use, safetensors' code, and numpy's type."""

from __future__ import annotations

import ml_dtypes
import numpy as np

_TABLE = (
    ("float64", "F64", np.float64),
    ("float32", "F32", np.float32),
    ("float16", "F16", np.float16),
    ("bfloat16", "BF16", ml_dtypes.bfloat16),
    ("float8_e4m3fn", "F8_E4M3", ml_dtypes.float8_e4m3fn),
    ("float8_e5m2", "F8_E5M2", ml_dtypes.float8_e5m2),
    ("int64", "I64", np.int64),
    ("int32", "I32", np.int32),
    ("int16", "I16", np.int16),
    ("int8", "I8", np.int8),
    ("uint64", "U64", np.uint64),
    ("uint32", "U32", np.uint32),
    ("uint16", "U16", np.uint16),
    ("uint8", "U8", np.uint8),
    ("bool", "BOOL", np.bool_),
)

NUMPY: dict[str, np.dtype] = {name: np.dtype(kind) for name, _, kind in _TABLE}
"""numpy dtype by torch's name for it."""

NAME: dict[str, str] = {code: name for name, code, _ in _TABLE}
"""torch's name by safetensors dtype code."""


def itemsize(name: str) -> int:
    """Bytes of one element of the dtype called `name`."""
    return NUMPY[name].itemsize
