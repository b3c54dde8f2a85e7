"""A model's folder appears whole or not at all, once, whoever else builds it."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from localizer.workload.build import CONFIG, SCRATCH, WEIGHTS, build, is_built


def write(folder: Path) -> None:
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS).write_bytes(b"weights")


def test_a_model_is_built_once(tmp_path: Path) -> None:
    times = []
    for _ in range(2):
        build(tmp_path / "models" / "m", lambda folder: (times.append(1), write(folder))[0])
    assert is_built(tmp_path / "models" / "m")
    assert times == [1]
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["m"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupted(folder: Path) -> None:
        write(folder)
        raise error

    with pytest.raises(error):
        build(tmp_path / "m", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_build_left_is_removed_and_others_scratch_stays(tmp_path: Path) -> None:
    left, other = tmp_path / f"{SCRATCH}m-abc", tmp_path / f"{SCRATCH}n-abc"
    for folder in (left, other):
        (folder / "deep").mkdir(parents=True)
    build(tmp_path / "m", write)
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "m"]


def test_half_a_model_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / CONFIG).write_text("half")
    build(tmp_path / "m", write)
    assert (tmp_path / "m" / CONFIG).read_text() == "{}"


def _build_slowly(folder: Path, log: Path, barrier: object) -> None:
    def slow(scratch: Path) -> None:
        with log.open("a") as handle:
            handle.write(f"{os.getpid()}\n")
        write(scratch)

    barrier.wait()  # type: ignore[attr-defined]
    build(folder, slow)
    assert is_built(folder)


def test_of_several_processes_one_builds(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, folder, log = context.Barrier(4), tmp_path / "models" / "m", tmp_path / "log"
    processes = [context.Process(target=_build_slowly, args=(folder, log, barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(log.read_text().split()) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["m"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", refuse)
    scratch = tmp_path / f"{SCRATCH}m-abc"
    scratch.mkdir()
    build(tmp_path / "m", write)
    assert is_built(tmp_path / "m")
    assert scratch.is_dir()  # somebody may be at work in it
