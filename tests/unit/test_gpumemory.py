"""Memory in use on GPUs before and after a run; there is no GPU here: `DoubledNvml` stands in for NVML."""

from __future__ import annotations

import ctypes
from typing import Any

from localizer.capture import gpumemory
from localizer.capture.gpumemory import settled, used
from localizer.store.schema import GPU_SLACK, GpuMemory

MIB = 1 << 20


class DoubledNvml:
    """Two GPUs, of which the second does not tell its memory; or a library that does not start."""

    def __init__(self, starts: bool = True) -> None:
        self.starts, self.open = starts, False

    def __call__(self, name: str) -> DoubledNvml:
        assert name == "libnvidia-ml.so.1"
        return self

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open = self.starts
        return 0 if self.starts else 9

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open = False
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:  # noqa: N802
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetUUID(self, device: Any, name: Any, size: int) -> int:  # noqa: N802
        name.value = f"GPU-0000-{device.value}".encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:  # noqa: N802
        if device.value == 2:
            return 3
        ctypes.memmove(ctypes.addressof(memory._obj), (ctypes.c_ulonglong * 3)(100, 58, 42), 24)
        return 0


def test_what_is_in_use() -> None:
    nvml = DoubledNvml()
    assert used(nvml) == {"0000-1": 42}
    assert not nvml.open
    assert used(DoubledNvml(starts=False)) == {}


def test_without_the_library_nothing_is_known() -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    assert used(missing) == {}
    assert settled({}, lambda: {"x": 1}) == []


def test_memory_is_given_time_to_become_free() -> None:
    left = iter([900 * MIB, 500 * MIB, 100 * MIB, 0])
    found = settled({"a": 90 * MIB, "b": 5}, lambda: {"a": next(left), "c": 7}, pause=0)
    assert found == [GpuMemory(uuid="a", before=90 * MIB, after=100 * MIB)]
    assert found[0].left == 0
    assert next(left) == 0


def test_what_does_not_become_free_is_told(monkeypatch: Any) -> None:
    monkeypatch.setattr(gpumemory, "SETTLE_SECONDS", 0.01)
    (found,) = settled({"a": 5}, lambda: {"a": 5 + GPU_SLACK + 1}, pause=0)
    assert found.left == GPU_SLACK + 1
