"""The records of runs: `captures/runs/NNNN`, each under the next number, nothing overwritten, resumable."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

import localizer
from localizer.errors import DamagedCapture, NotACapture
from localizer.store import names, schema, tensors
from localizer.store.reader import Capture

FORMAT, SCHEMA = "localizer-run", 1
RUN, STEPS, RESULT, REPORT = "run.json", "steps.jsonl", "result.json", "report.txt"


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


class _Result(msgspec.Struct, frozen=True):
    """Of result.json what the history shows."""

    verdict: Literal["identical", "diverged", "inconclusive"]


class RunFolder:
    """One run's folder."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.done = _lines(folder / STEPS)

    @classmethod
    def new(cls, root: Path, key: str, config: dict[str, Any]) -> RunFolder:
        """Begin a run."""
        folder, _ = names.next_folder(root, names.RUNS)
        run = Run(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            localizer=localizer.__version__,
            key=key,
            config=config,
        )
        tensors.replace(folder / RUN, msgspec.json.format(msgspec.json.encode(run), indent=1))
        return cls(root, folder)

    @classmethod
    def unfinished(cls, root: Path, key: str) -> RunFolder | None:
        """The newest run, if it was interrupted and is of the same key."""
        found = folders(root)
        if not found or (found[-1] / RESULT).exists():
            return None
        run = read(found[-1])
        return cls(root, found[-1]) if run is not None and run.key == key else None

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
        """Keep the result, as JSON and as text; after this the run is finished."""
        tensors.replace(self.folder / REPORT, report.encode())
        tensors.replace(self.folder / RESULT, result.encode())


def folders(root: Path) -> list[Path]:
    """The folders of all runs, oldest first."""
    return names.numbered(root / names.RUNS)


def verdict(folder: Path) -> str | None:
    """The verdict of a finished run; None where it is not finished, or cannot be read."""
    try:
        found = schema.parse(schema.read(folder / RESULT), _Result)
    except (ValueError, DamagedCapture):
        return None
    return found.verdict


def read(folder: Path) -> Run | None:
    """The run.json of a run; None where it cannot be read."""
    try:
        run = schema.parse(schema.read(folder / RUN), Run)
    except (ValueError, DamagedCapture):
        return None
    return run if (run.format, run.schema) == (FORMAT, SCHEMA) else None


def _lines(path: Path) -> list[Done]:
    """Finished captures; a torn last line is what a killed run leaves."""
    found = []
    try:
        lines = schema.read(path).split(b"\n")
    except DamagedCapture:
        return []
    for line in lines:
        try:
            found.append(schema.parse(line, Done))
        except ValueError:
            continue
    return found
