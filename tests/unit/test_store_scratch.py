"""Large arrays lie in a file without a name, and in memory where there is no room for one."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from localizer.store import scratch


def base(array: np.ndarray) -> object:
    """What holds the bytes of an array."""
    found: object = array
    while isinstance(found, np.ndarray) and found.base is not None:
        found = found.base
    return found


@pytest.mark.parametrize("shape", [scratch.LARGE // 8, (scratch.LARGE // 64, 8)])
def test_a_large_array_lies_in_a_file_that_nobody_sees(
    shape: int | tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    array = scratch.zeros(shape, np.int64)
    assert isinstance(base(array), mmap.mmap)
    assert type(array) is np.ndarray
    assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert not array.any()
    array[:] = 7
    assert (array == 7).all()
    assert list(tmp_path.iterdir()) == []


def test_a_small_one_does_not() -> None:
    array = scratch.zeros(10, np.int32)
    assert (array.dtype, array.tolist()) == (np.int32, [0] * 10)
    assert not isinstance(base(array), mmap.mmap)
    assert scratch.zeros((0, 4), np.uint8).shape == (0, 4)


def test_where_the_disk_is_full_it_lies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    array = scratch.zeros(scratch.LARGE, np.uint8)
    assert not isinstance(base(array), mmap.mmap)
    array[-1] = 1
    assert array.sum() == 1
