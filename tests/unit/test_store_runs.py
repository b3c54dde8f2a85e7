"""The records of runs: one process at a time, the next number, what resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from localizer.errors import LocalizerError
from localizer.store import runs

RESULT = '{"verdict": "identical", "steps": [{"state": "complete"}]}'
TORN = '{"verdict": "inconclusive", "steps": [{"state": "incomplete"}]}'

HOLDER = """
import sys, time
from pathlib import Path
from localizer.store import runs
record = runs.begin(Path(sys.argv[1]), sys.argv[2], {})
print(record.folder.name, flush=True)
time.sleep(60)
"""


def holder(root: Path, key: str) -> subprocess.Popen[str]:
    """Another process that carries out a run."""
    command = [sys.executable, "-c", HOLDER, str(root), key]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def begin(root: Path, key: str = "k", *, fresh: bool = False) -> tuple[str, bool]:
    """Begin a run and leave it at once: its number, and whether it was resumed."""
    with runs.begin(root, key, {}, fresh=fresh) as record:
        return record.folder.name, record.resumed


def test_what_resumes(tmp_path: Path) -> None:
    assert begin(tmp_path) == ("0001", False)
    assert begin(tmp_path) == ("0001", True)
    assert begin(tmp_path, fresh=True) == ("0002", False)
    assert begin(tmp_path, "other") == ("0003", False)
    assert begin(tmp_path) == ("0002", True), "another run in between does not matter"
    with runs.begin(tmp_path, "k", {}) as record:
        record.finish(TORN, "")
    assert begin(tmp_path) == ("0002", True), "a capture did not finish"
    with runs.begin(tmp_path, "k", {}) as record:
        record.finish(RESULT, "")
    assert begin(tmp_path) == ("0004", False)
    assert begin(tmp_path, "other") == ("0003", True)


@pytest.mark.parametrize("fresh", [False, True])
def test_one_process_at_a_time(tmp_path: Path, fresh: bool) -> None:
    with runs.begin(tmp_path, "k", {}):
        with pytest.raises(LocalizerError, match=r"Another localize run is carrying out .*runs/0001.*wait"):
            begin(tmp_path, fresh=fresh)
        assert begin(tmp_path, "other") == ("0002", False), "runs of something else go on"
    assert begin(tmp_path, fresh=fresh)[1] is not fresh


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    process = holder(tmp_path, "k")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "0001\n"
        with pytest.raises(LocalizerError, match="Another localize run"):
            begin(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert begin(tmp_path) == ("0001", True)
    finally:
        process.kill()
        process.wait()


def test_several_that_begin_at_once(tmp_path: Path) -> None:
    """Of equal ones a single one goes on; different ones get different numbers."""
    processes = [holder(tmp_path, key) for key in ("a", "a", "b", "a", "c")]
    try:
        told = []
        for process in processes:
            assert process.stdout is not None
            told.append(process.stdout.readline().strip())  # empty of one that was refused
        assert sorted(filter(None, told)) == ["0001", "0002", "0003"]
        assert sum(bool(told[index]) for index in (0, 1, 3)) == 1
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "captures").write_text("a file")
    with pytest.raises(LocalizerError, match="--out"):
        begin(tmp_path / "captures")
