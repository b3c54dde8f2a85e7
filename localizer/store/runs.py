"""The records of runs: `captures/runs/NNNN`, each under the next number, resumable, one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any, Literal

import msgspec

import localizer
from localizer.errors import DamagedCapture, LocalizerError, NotACapture
from localizer.store import names, schema, tensors
from localizer.store.reader import Capture

FORMAT, SCHEMA = "localizer-run", 1
RUN, STEPS, RESULT, REPORT = "run.json", "steps.jsonl", "result.json", "report.txt"
LOCK, COMPILED = "lock", "compiled"
"""What a process holds while it carries a run out; where its arms keep compiled code until it is over."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """run.json: what was asked for, written before the first capture.

    Attributes:
        key: digest of the configuration and of both sources; a run resumes only under the same one.
        config: the configuration with what options put over it.
    """

    format: str = FORMAT
    schema: int = SCHEMA
    created: str
    localizer: str
    key: str
    config: dict[str, Any]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A line of steps.jsonl: a capture that is finished and complete, and under which settings.

    Attributes:
        step: its name.
        number: of the capture.
        seconds: that it took.
        manifest: xxh3-128 of the capture's manifest.
        pinned: to how many KV cache blocks it was set; None for none.
        ways: the rows that a witness capture keeps, as text; empty in the first pass.
    """

    step: str
    number: Annotated[int, msgspec.Meta(ge=1, le=999_999_999)]
    seconds: float
    manifest: str
    pinned: int | None = None
    ways: str = ""


def digest(capture: Capture) -> str:
    """xxh3-128 in hex of a capture's manifest, which holds the digests of all its files."""
    return tensors.file_digest(capture.folder / schema.MANIFEST)


class _Step(msgspec.Struct, frozen=True):
    """Of a capture in result.json what decides whether it is made anew."""

    state: Literal["complete", "incomplete"] = schema.COMPLETE  # type: ignore[assignment]


class _Result(msgspec.Struct, frozen=True):
    """Of result.json what the history shows, and what resuming has to know."""

    verdict: Literal["identical", "diverged", "inconclusive"]
    steps: list[_Step] = []


class RunFolder:
    """One run's folder, to be read; or, with its lock, this process's alone until it is closed or that ends.

    Attributes:
        folder: of the records.
        done: finished captures, oldest first.
        resumed: whether an earlier process began it.
    """

    def __init__(
        self, root: Path, folder: Path, lock: IO[bytes] | None = None, *, resumed: bool = False
    ) -> None:
        self.root, self.folder, self.resumed = root, folder, resumed
        self.done = finished_captures(folder)
        self._lock = lock

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes have it."""
        if self._lock is not None:
            self._lock.close()

    @property
    def compiled(self) -> Path:
        """Where the arms of this run, and of no other, keep compiled code."""
        return self.folder.absolute() / COMPILED

    def find(self, step: str, pinned: int | None, ways: str) -> tuple[Capture, Done] | None:
        """The capture that an earlier try of this run made for a step, if it is still there and complete."""
        for done in reversed(self.done):
            if (done.step, done.pinned, done.ways) == (step, pinned, ways):
                try:
                    capture = Capture(self.root / step / f"{done.number:04d}")
                except (NotACapture, DamagedCapture):
                    return None
                same = capture.complete and digest(capture) == done.manifest
                return (capture, done) if same else None
        return None

    def add(self, done: Done) -> None:
        """Note a finished capture, durably."""
        self.done.append(done)
        with (self.folder / STEPS).open("ab") as handle:
            handle.write(b"\n" + msgspec.json.encode(done) + b"\n")  # behind what a killed run has torn
            handle.flush()
            os.fsync(handle.fileno())

    def finish(self, result: str, report: str) -> None:
        """Keep the result, as JSON and as text; the run is finished then, if all of its captures are."""
        tensors.replace(self.folder / REPORT, report.encode())
        tensors.replace(self.folder / RESULT, result.encode())


def begin(root: Path, key: str, config: dict[str, Any], *, fresh: bool = False) -> RunFolder:
    """Go on with the newest run of a key if it is not finished, else begin the next one.

    Args:
        root: folder of the captures.
        key: digest of the configuration and of both sources.
        config: the configuration, for the record.
        fresh: begin the next one in any case.

    Raises:
        LocalizerError: another process carries out a run of this key in `root`, or nothing can be written.
    """
    with _choosing(root):
        for folder in reversed(folders(root)):
            run = read(folder)
            if run is None or run.key != key:
                continue
            lock = _lock(folder)
            if not fresh and not finished(folder):
                return RunFolder(root, folder, lock, resumed=True)
            lock.close()
            break
        folder, _ = names.next_folder(root, names.RUNS)
        lock = _lock(folder)
        run = Run(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            localizer=localizer.__version__,
            key=key,
            config=config,
        )
        tensors.replace(folder / RUN, msgspec.json.format(msgspec.json.encode(run), indent=1))
        return RunFolder(root, folder, lock)


@contextlib.contextmanager
def _choosing(root: Path) -> Iterator[None]:
    """One process at a time looks for its run, or two would begin the same."""
    place = root / names.RUNS
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = (place / LOCK).open("ab")
    except OSError as error:
        raise names.unwritable(root, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise _unlockable(place, error) from None
        yield


def _lock(folder: Path) -> IO[bytes]:
    """Take a run's folder, which the operating system gives back when this process ends.

    Raises:
        LocalizerError: another process has it.
    """
    try:
        lock = (folder / LOCK).open("ab")
    except OSError as error:
        raise names.unwritable(folder, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise LocalizerError(
            f"Another localize run is carrying out {folder}, with the same configuration and sources; wait "
            "until it has ended, or stop it and give the command again, which then resumes it."
        ) from None
    except OSError as error:
        lock.close()
        raise _unlockable(folder, error) from None
    return lock


def _unlockable(folder: Path, error: OSError) -> LocalizerError:
    return LocalizerError(
        f"{folder} cannot be locked ({error.strerror}); name a folder on another file system with --out."
    )


def folders(root: Path) -> list[Path]:
    """The folders of all runs, oldest first."""
    return names.numbered(root / names.RUNS)


def verdict(folder: Path) -> str | None:
    """The verdict of a run; None where it has none yet, or it cannot be read."""
    found = _result(folder)
    return None if found is None else found.verdict


def finished(folder: Path) -> bool:
    """Whether a run has its result and none of its captures is to be made anew."""
    found = _result(folder)
    return found is not None and all(step.state == schema.COMPLETE for step in found.steps)


def _result(folder: Path) -> _Result | None:
    try:
        return schema.parse(schema.read(folder / RESULT), _Result)
    except (ValueError, DamagedCapture):
        return None


def read(folder: Path) -> Run | None:
    """The run.json of a run; None where it cannot be read."""
    try:
        run = schema.parse(schema.read(folder / RUN), Run)
    except (ValueError, DamagedCapture):
        return None
    return run if (run.format, run.schema) == (FORMAT, SCHEMA) else None


def finished_captures(folder: Path) -> list[Done]:
    """What steps.jsonl of a run holds; a torn last line is what a killed run leaves."""
    found = []
    try:
        lines = schema.read(folder / STEPS).split(b"\n")
    except DamagedCapture:
        return []
    for line in lines:
        try:
            found.append(schema.parse(line, Done))
        except ValueError:
            continue
    return found
