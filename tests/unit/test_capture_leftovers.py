"""Shared memory that a run made and left is removed; what others use, or may have made, is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localizer.capture.leftovers import LEFT, REMOVED, SharedMemory, members
from localizer.capture.processes import end_group
from localizer.wire import process

USER = """
import mmap, sys, time
for name in sys.argv[1:]:
    file = open(name, "w+b")
    file.truncate(4096)
    if "mapped" in name:
        mapped = mmap.mmap(file.fileno(), 4096)
        file.close()
        globals()[name] = mapped
    else:
        globals()[name] = file
print("ready", flush=True)
time.sleep(60)
"""
"""Makes files, maps some and keeps the others open, as the processes of a run do."""


class Run:
    """A process in a group of its own that uses shared memory."""

    def __init__(self, *files: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, *map(str, files)], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def end(self) -> None:
        end_group(self.process, grace=0)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """Runs that are ended in any case."""
    started: list[Run] = []
    yield started
    for run in started:
        run.end()


def test_what_the_run_used_is_removed(tmp_path: Path, runs: list[Run]) -> None:
    (tmp_path / "psm_before").write_bytes(b"1")
    shared = SharedMemory(tmp_path)
    names = ["psm_mapped", "any-mapped", "sem.opened", "torch_0_gone"]
    runs.append(Run(*(tmp_path / name for name in names)))
    shared.look(runs[0].process.pid)
    (tmp_path / "torch_0_gone").unlink()  # the run cleans up what it can
    runs[0].end()
    assert shared.clean() == dict.fromkeys(["any-mapped", "psm_mapped", "sem.opened"], REMOVED)
    assert [path.name for path in tmp_path.iterdir()] == ["psm_before"]


def test_what_others_made_or_use_stays(tmp_path: Path, runs: list[Run]) -> None:
    shared = SharedMemory(tmp_path)
    runs.append(Run(tmp_path / "psm_mapped"))
    runs.append(Run(tmp_path / "psm_other_mapped", tmp_path / "torch_other"))
    shared.look(runs[0].process.pid)
    for name in ("psm_nobody", "notes.txt", f"torch_{runs[0].process.pid}_1_2", "torch_1_2_3"):
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "psm_link").symlink_to(tmp_path / "notes.txt")
    runs[0].end()
    assert shared.clean() == {
        "psm_mapped": REMOVED,
        "psm_nobody": LEFT,
        "torch_1_2_3": LEFT,
        f"torch_{runs[0].process.pid}_1_2": REMOVED,
    }
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        "psm_nobody", "notes.txt", "psm_link", "psm_other_mapped", "torch_other", "torch_1_2_3"
    }  # fmt: skip


def test_what_the_run_still_uses_stays(tmp_path: Path, runs: list[Run]) -> None:
    shared = SharedMemory(tmp_path)
    runs.append(Run(tmp_path / "psm_mapped"))
    shared.look(runs[0].process.pid)
    assert shared.clean() == {}
    assert (tmp_path / "psm_mapped").exists()


def test_a_machine_without_shared_memory(tmp_path: Path) -> None:
    shared = SharedMemory(tmp_path / "nowhere")
    shared.look(os.getpgid(0))
    assert shared.clean() == {}


def test_nothing_of_a_group_is_left(tmp_path: Path, runs: list[Run]) -> None:
    runs.append(Run())
    group = runs[0].process.pid
    assert members(group) == [group]
    assert os.getpid() in members(os.getpgid(0))
    runs[0].process.kill()
    os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT)
    assert members(group) == []  # a zombie holds nothing
    runs[0].end()
    assert members(group) == []


def test_what_a_process_has_used() -> None:
    assert process.peak_memory() == pytest.approx(process.peak_memory(os.getpid()), rel=0.1)
    assert process.peak_memory() > 1 << 20
    assert 0 < process.age() == pytest.approx(process.age(os.getpid()), abs=1)
    with pytest.raises(OSError, match="No such"):
        process.peak_memory(1 << 30)
    with pytest.raises(OSError, match="No such"):
        process.age(1 << 30)
