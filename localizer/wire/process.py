"""What the kernel tells of a process on Linux: its peak memory and its age."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def peak_memory(pid: int | None = None) -> int:
    """Peak resident memory of a process, of this one by default, in bytes.

    Raises:
        OSError: there is no such process, or the kernel does not say.
    """
    found = _PEAK.search(Path(f"/proc/{pid or 'self'}/status").read_bytes())
    if found:
        return int(found[1]) * 1024
    if pid is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    raise OSError(f"the kernel does not tell the peak memory of process {pid}")


def age(pid: int | None = None) -> float:
    """Seconds since a process, this one by default, was started.

    Raises:
        OSError: there is no such process.
    """
    fields = Path(f"/proc/{pid or 'self'}/stat").read_bytes().rpartition(b")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, float(Path("/proc/uptime").read_text().split()[0]) - started)
