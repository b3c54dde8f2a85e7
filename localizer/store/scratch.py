"""Large arrays of a process in a file without a name: the kernel may write them out, and they end with it."""

from __future__ import annotations

import math
import os
import tempfile

import numpy as np
import numpy.typing as npt

LARGE = 1 << 20
"""Bytes from which on an array lies in a file."""


def zeros(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """An array of zeros, as `numpy.zeros` gives it; in memory too where no temporary file can be made."""
    size = math.prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
    if size >= LARGE:
        try:
            with tempfile.TemporaryFile(prefix="localizer-") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is found out here, not by a signal
                return np.asarray(np.memmap(file, dtype, "r+", shape=shape))
        except OSError:
            pass
    return np.zeros(shape, dtype)
