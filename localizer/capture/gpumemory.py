"""How much memory of each GPU is in use, by NVIDIA's management library (NVML), which comes with the driver.

Seen on an H200 with driver 580; NVML is doubled in the tests.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from typing import Any

from localizer.store.schema import GPU_SLACK, GpuMemory

LIBRARY = "libnvidia-ml.so.1"

SETTLE_SECONDS, PAUSE = 5.0, 0.25
"""How long memory of processes that have ended may take to be free, and how often that is looked at."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t: bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def used(load: Callable[[str], Any] = ctypes.CDLL) -> dict[str, int]:
    """Bytes in use on each GPU by its UUID; empty where there is no NVML, or it does not say."""
    try:
        nvml = load(LIBRARY)
    except OSError:
        return {}
    if nvml.nvmlInit_v2():
        return {}
    found = {}
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return {}
        for index in range(count.value):
            device, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Memory()
            if (
                nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
                and nvml.nvmlDeviceGetUUID(device, name, len(name)) == 0
                and nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
            ):
                found[name.value.decode(errors="replace").removeprefix("GPU-")] = int(memory.used)
    finally:
        nvml.nvmlShutdown()
    return found


def settled(
    before: Mapping[str, int], look: Callable[[], dict[str, int]] = used, pause: float = PAUSE
) -> list[GpuMemory]:
    """What is in use when a run is over, beside what was before it; waits a little for it to become free."""
    deadline = time.monotonic() + SETTLE_SECONDS
    after = look() if before else {}
    while any(after.get(uuid, 0) > held + GPU_SLACK for uuid, held in before.items()):
        if time.monotonic() > deadline:
            break
        time.sleep(pause)
        after = look()
    return [
        GpuMemory(uuid=uuid, before=held, after=after[uuid]) for uuid, held in before.items() if uuid in after
    ]
