"""Facts of this machine that decide whether a capture would work: memory, disks, compiler."""

from __future__ import annotations

import mmap
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Facts of this machine.

    Attributes:
        system: as `uname` names it, with `release`.
        memory_total: bytes.
        memory_available: bytes that a new process could have.
        memory_limit: bytes that this container may use at most; 0 without a limit.
        memory_file: why anonymous memory files cannot be used; empty where they can.
        shared_memory: free bytes of /dev/shm; None where there is none.
        disks: (folder as named, free bytes, whether it can be written) of captures and cache.
        compiler: the C++ compiler that vLLM would call; empty where there is none.
        headers_error: why it cannot compile a file that includes Python.h; empty where it can.
        gpu_driver: whether a GPU's driver is loaded.
    """

    system: str
    release: str
    memory_total: int
    memory_available: int
    memory_limit: int
    memory_file: str
    shared_memory: int | None
    disks: Mapping[str, tuple[str, int, bool]]
    compiler: str
    headers_error: str
    gpu_driver: bool


def look(root: Path, cache: Path, include: str, environment: Mapping[str, str]) -> Machine:
    """Facts of this machine; `include` is where the interpreter's C headers should be."""
    total, available = _memory()
    compiler, error = _compiler(include, environment)
    return Machine(
        system=platform.system(),
        release=platform.release(),
        memory_total=total,
        memory_available=available,
        memory_limit=_memory_limit(),
        memory_file=_memory_file(),
        shared_memory=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        disks={"captures": _disk(root), "cache": _disk(cache)},
        compiler=compiler,
        headers_error=error,
        gpu_driver=os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/kfd"),
    )


def _memory() -> tuple[int, int]:
    """Total and available memory in bytes; 0 where /proc does not say."""
    found = {"MemTotal": 0, "MemAvailable": 0}
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0]) << 10
    return found["MemTotal"], found["MemAvailable"]


def _memory_limit() -> int:
    """The memory limit of this container in bytes, 0 without one."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limit = int((Path("/sys/fs/cgroup") / name).read_text())
            return limit if limit < 1 << 60 else 0
    return 0


def _memory_file() -> str:
    """Why the ring between worker and writer cannot be made; empty where it can."""
    try:
        handle = os.memfd_create("localizer-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, mmap.PAGESIZE)
            other = os.open(f"/proc/{os.getpid()}/fd/{handle}", os.O_RDWR)
            try:
                mmap.mmap(other, mmap.PAGESIZE).close()
            finally:
                os.close(other)
        finally:
            os.close(handle)
    except (OSError, AttributeError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def _disk(folder: Path) -> tuple[str, int, bool]:
    """The folder, free bytes where it is or would be, and whether it can be written there."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return str(folder), shutil.disk_usage(place).free, place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def _compiler(include: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """The C++ compiler that torch would call, and why it cannot compile against Python's headers."""
    command = shlex.split(environment.get("CXX") or "") or ["g++"]
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        return "", ""
    flags = ["-x", "c++", "-fsyntax-only", *([f"-I{include}"] if include else []), "-"]
    try:
        done = subprocess.run(
            [*command, *flags],
            input=b"#include <Python.h>\n",
            env=dict(environment),
            capture_output=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return command[0], str(error)
    said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
    return command[0], said[0] if done.returncode else ""
