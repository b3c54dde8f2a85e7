"""However a run ends, a readable capture is left and nothing keeps running."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from engines import IN_PROCESS

from localizer.store import names
from localizer.store.reader import Capture
from localizer.store.verify import INCOMPLETE, verify

pytestmark = pytest.mark.engine

ENDLESS = (
    *("--model", "tiny", "--matrix", "16", "--repeats", "500", "--max-tokens", "200"),
    *("--engine", "enforce_eager=true", "--engine", "kv_cache_memory_bytes=268435456"),
)
"""A workload that takes much longer than any test, and fills a shard within some 200 steps."""

PATIENCE = 240.0
"""Seconds after which something that should have happened counts as not happening."""


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail when it does not come."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.1)


def _hearing_ctrl_c() -> None:
    """A shell starts what runs in the background, such as these tests, deaf to SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Running:
    """A `localize capture` under way."""

    def __init__(self, root: Path, *options: str) -> None:
        command = [
            sys.executable,
            "-m",
            "localizer",
            "capture",
            "victim",
            *ENDLESS,
            "--out",
            str(root),
            *options,
        ]
        self.errors = root / "stderr.txt"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stderr=errors, start_new_session=True, preexec_fn=_hearing_ctrl_c
            )
        self.root = root

    def going(self) -> bool:
        """True: a capture that has ended will not do what a test waits for."""
        assert self.process.poll() is None, self.errors.read_text()
        return True

    def saying(self, text: str) -> bool:
        """Whether progress has said `text`."""
        return self.going() and text in self.errors.read_text()

    def shards(self) -> int:
        """How many shards are on disk that keep rows."""
        return sum(1 for _ in self.root.rglob("payload-*.safetensors"))

    def family(self) -> list[psutil.Process]:
        """localize and all its descendants."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def find(self, marker: str) -> psutil.Process:
        """The descendant whose command line holds `marker`."""
        return next(child for child in self.family() if marker in " ".join(child.cmdline()))

    def generating(self) -> None:
        """Wait until rows are being recorded on disk."""
        until(lambda: self.saying("generating"), "the engine generates")
        until(lambda: self.going() and self.shards() > 0, "a shard is on disk")

    def ended(self) -> int:
        """Wait for localize to end; its exit status."""
        return self.process.wait(PATIENCE)

    def capture(self) -> Capture:
        """What was left."""
        return names.load(self.root, "victim")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start captures; whatever is left of them at the end is killed."""
    started: list[tuple[Running, list[psutil.Process]]] = []

    def start(*options: str, environment: dict[str, str] | None = None) -> Running:
        pairs = [item for key, value in (environment or {}).items() for item in ("--env", f"{key}={value}")]
        begun = Running(tmp_path, *options, *pairs)
        started.append((begun, []))
        return begun

    yield start
    for begun, _ in started:
        if begun.process.poll() is None:
            for process in begun.family():
                process.kill()
            begun.process.wait()


def gone(family: list[psutil.Process]) -> Callable[[], bool]:
    """Whether no process of the family runs any more."""
    return lambda: not any(item.is_running() and item.status() != psutil.STATUS_ZOMBIE for item in family)


def assert_sound_but_incomplete(capture: Capture) -> None:
    """The capture is readable, and says that it is not whole."""
    result = verify(capture.folder)
    assert (result.state, result.rows > 0) == (INCOMPLETE, True), result
    assert not capture.complete
    assert capture.outputs


def kill_while_generating(run: Running, victim: str, said: str) -> None:
    """localize says why it ends, nothing is left behind, and what was recorded is sound."""
    run.generating()
    family = run.family()
    run.find(victim).kill()
    assert run.ended() == 2
    assert said in run.errors.read_text()
    until(gone(family), "every process is gone")
    assert_sound_but_incomplete(run.capture())


def test_kill_of_the_engine(running: Callable[..., Running]) -> None:
    run = running(environment=IN_PROCESS)
    kill_while_generating(run, "localizer.hooks.program", "The source ended early: it was ended by signal 9")


@pytest.mark.parametrize(
    ("victim", "cause"),
    [
        ("VLLM::Worker", "the process VllmWorker-0 died"),
        ("VLLM::EngineCore", "the process EngineCore died (exit status -9)"),
    ],
)
def test_kill_in_the_multiprocess_engine(running: Callable[..., Running], victim: str, cause: str) -> None:
    kill_while_generating(running(), victim, f"The source ended early: {cause}")


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two processors")
def test_kill_of_one_of_two_workers(running: Callable[..., Running]) -> None:
    run = running(
        *("--engine", "tensor_parallel_size=2"),
        environment=IN_PROCESS | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    kill_while_generating(run, "VLLM::Worker_TP1", "The source ended early: the process VllmWorker-1 died")
    assert {part.rank for part in run.capture().sets} == {0, 1}


def test_kill_of_localize(running: Callable[..., Running]) -> None:
    run = running()
    run.generating()
    family = run.family()
    run.process.kill()
    until(gone(family), "engine and writer end by themselves")
    assert_sound_but_incomplete(run.capture())


def test_kill_of_the_writer(running: Callable[..., Running]) -> None:
    kill_while_generating(running(environment=IN_PROCESS), "localizer.capture.writer", "The writer of")


@pytest.mark.parametrize("phase", ["starting vLLM", "loading the model", "generating"])
def test_interrupt(running: Callable[..., Running], phase: str) -> None:
    run = running(environment=IN_PROCESS)
    if phase == "generating":
        run.generating()
    else:
        until(lambda: run.saying(phase), phase)
    family = run.family()
    run.process.send_signal(signal.SIGINT)
    assert run.ended() == 130
    assert "Traceback" not in run.errors.read_text()
    until(gone(family), "every process is gone")
    assert verify(run.capture().folder).state == INCOMPLETE


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small disk needs root"
)
def test_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        pairs = [f"{key}={value}" for key, value in IN_PROCESS.items()]
        command = [sys.executable, "-m", "localizer", "capture", "victim", *ENDLESS, "--payload", "all"]
        done = subprocess.run(
            [*command, "--out", str(disk), "--env", *pairs], capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 2
        assert "free some space or name another folder with --out" in done.stderr
        assert "Traceback" not in done.stderr
        assert verify(names.find(disk, "victim")).state == INCOMPLETE
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ("--engine", "no_such_argument=1"),
            "vLLM has no engine argument 'no_such_argument'; check --engine",
        ),
        (("--engine", "max_model_len=-5"), "vLLM refused an engine argument"),
        (("--layers", "0,9"), "there is no layer 9 to tap; the model has 8, numbered from 0"),
    ],
)
def test_what_vllm_refuses_is_said_in_a_sentence(
    tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    pairs = [f"{key}={value}" for key, value in IN_PROCESS.items()]
    command = [sys.executable, "-m", "localizer", "capture", "refused", *ENDLESS, *options, "--env", *pairs]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert sentence in last, done.stderr
    assert verify(names.find(tmp_path, "refused")).state == INCOMPLETE
