"""What a run may leave behind on the machine: processes, and shared memory in /dev/shm."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

SHARED = Path("/dev/shm")
"""Where Linux keeps named shared memory."""

KINDS = re.compile(r"(psm_|torch_|sem\.|vllm)")
"""How the names begin of what Python's multiprocessing, torch and vLLM make there."""

REMOVED, LEFT = "removed", "left, it may not be of this run"

Entry = tuple[str, int]
"""Name and inode: a name may be used again."""


class SharedMemory:
    """Watches which shared memory the processes of a run use, so that it knows what they leave."""

    def __init__(self, folder: Path = SHARED) -> None:
        self._folder = folder
        self._before = self._entries()
        self._used: set[Entry] = set()
        self._processes: set[int] = set()

    def look(self, group: int) -> None:
        """Note what the processes of a group use of what was not there before the run."""
        living = members(group)
        self._processes |= set(living)
        new = self._new()
        if new:
            inodes = {inode for pid in living for inode in _mapped(pid, self._folder)}
            self._used |= {entry for entry in new if entry[1] in inodes}

    def clean(self) -> dict[str, str]:
        """Remove what the run's processes made and left; to be called when they have ended.

        Returns:
            What was left by name: `REMOVED`, or `LEFT` where it is not surely of this run. What a living
            process uses is not among it.
        """
        new = {entry for entry in self._new() if entry in self._used or KINDS.match(entry[0])}
        if new:
            in_use = {inode for pid in _processes() for inode in _mapped(pid, self._folder)}
            new = {entry for entry in new if entry[1] not in in_use}
        found = {}
        for name, inode in sorted(new):
            found[name] = LEFT
            if (name, inode) in self._used or self._names_us(name):
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink()
                    found[name] = REMOVED
        return found

    def _names_us(self, name: str) -> bool:
        """Whether torch made it in a process of the run: it puts the process id into the name."""
        made = re.match(r"torch_(\d+)_", name)
        return made is not None and int(made[1]) in self._processes

    def _new(self) -> set[Entry]:
        return self._entries() - self._before

    def _entries(self) -> set[Entry]:
        """The files of this user."""
        found = set()
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    if entry.is_file(follow_symlinks=False) and facts.st_uid == os.getuid():
                        found.add((entry.name, facts.st_ino))
        return found


def members(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    return [pid for pid in _processes() if _group(pid) == group]


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _group(pid: int) -> int:
    """The group of a process; 0 if it has ended, even if nobody has asked for its exit status."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[2])


def _mapped(pid: int, folder: Path) -> Iterator[int]:
    """Inodes of the files in a folder that a process maps or has open."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[5].startswith(os.fsencode(folder)):
                yield int(fields[4])
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                opened = f"/proc/{pid}/fd/{name}"
                if os.readlink(opened).startswith(str(folder)):
                    yield os.stat(opened).st_ino
