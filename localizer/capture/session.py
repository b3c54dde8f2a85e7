"""One capture from beginning to end: prepare, launch, watch, stop, finalise."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

import localizer
from localizer.capture import gpumemory, leftovers, processes
from localizer.capture.diagnose import is_refusal, last_lines, likely_cause
from localizer.capture.finish import Heard, finalise
from localizer.capture.request import CaptureRequest, Prepared, prepare
from localizer.errors import CaptureFailed, Interrupted, LocalizerError
from localizer.store import names, schema, tensors, wait
from localizer.store.schema import Output
from localizer.wire import ring as rings
from localizer.wire.spec import EVENTS_VARIABLE, PROGRAM, SPEC_VARIABLE, RunSpec

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors that concern the folder of the captures, whatever they were met at."""

EXIT_SECONDS = 60.0
"""How long a source that has reported everything may take to end by itself."""

WRITING_SECONDS = 30.0
"""How long the writers of a capture that is stopped may take to write what they have."""

SOURCE = "source"
"""Who says what is heard: this, or the writer of the rank of that number."""


class Progress(Protocol):
    """What a capture tells while it runs."""

    def phase(self, text: str) -> None:
        """A phase begins."""

    def advance(self, rounds: int, of: int, steps: int, tokens: int) -> None:
        """Rounds finished, steps recorded, tokens returned so far."""


def capture(request: CaptureRequest, progress: Progress) -> Path:
    """Make a capture and return its folder.

    Raises:
        LocalizerError: the request is unusable; nothing was started.
        CaptureFailed: the source or the disk failed; the incomplete capture is kept and named.
        Interrupted: the person stopped it; likewise.
    """
    wait.patience()  # that it can be read
    progress.phase("looking at the source")
    prepared = prepare(request, progress.phase)
    folder, number = names.new_folder(request.root, request.name)
    opening = msgspec.structs.replace(prepared.opening, number=number)
    try:
        tensors.replace(folder / schema.OPEN, schema.encode(opening))
        (folder / schema.JOURNAL).touch()
        (folder / schema.LOG).touch()
    except OSError as error:
        raise LocalizerError(
            f"{folder} cannot be written ({error.strerror}); name another folder with --out."
        ) from None
    session = _Session(prepared, progress, folder)
    with _interruptible():
        try:
            session.run()
        except KeyboardInterrupt:
            session.stop()
            raise Interrupted(f"Stopped; what was recorded so far is in {folder}, incomplete.") from None
        except OSError as error:
            session.stop()
            raise _failed(folder, error) from None
        except BaseException:
            session.stop()
            raise
        finally:
            if prepared.laid is not None:
                prepared.laid.lock.close()
    wait.for_manifest(folder)
    return folder


def _failed(folder: Path, error: OSError) -> CaptureFailed:
    """What an operating-system error during a run means."""
    if error.errno in UNWRITABLE or str(error.filename or "").startswith(str(folder)):
        return _cannot_write(folder, error.strerror)
    return CaptureFailed(
        f"The capture in {folder} was stopped by the operating system ({error.strerror}); "
        "see what it lacks (processes, memory, file sizes) and make the capture again."
    )


def _cannot_write(folder: Path, reason: str | None) -> CaptureFailed:
    return CaptureFailed(
        f"{folder} cannot be written ({reason}); free some space or name another folder with --out."
    )


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM counts as Ctrl-C while a capture runs."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Session:
    """The children of one capture."""

    def __init__(self, prepared: Prepared, progress: Progress, folder: Path) -> None:
        self._prepared, self._progress, self._folder = prepared, progress, folder
        self._opening, self._taps = prepared.opening, prepared.opening.observer.taps
        self._queue: queue.Queue[tuple[str | int | None, dict[str, Any] | None]] = queue.Queue()
        self._heard = Heard()
        self._source: subprocess.Popen[bytes] | None = None
        self._writers: list[subprocess.Popen[bytes]] = []
        self._rings: list[rings.Ring] = []
        self._shared = leftovers.SharedMemory()
        self._gpu_memory = gpumemory.used()

    def run(self) -> None:
        """Launch, watch, and finalise.

        Raises:
            CaptureFailed: a child failed.
        """
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="localizer-") as scratch, contextlib.ExitStack() as stack:
            descriptors = []
            for rank in range(self._opening.observer.ranks if self._taps else 0):
                descriptors.append(rings.create(self._prepared.buffer))
                stack.callback(os.close, descriptors[-1])
                self._rings.append(rings.Ring(descriptors[-1]))
                stack.callback(self._rings[-1].unmap)
                self._start_writer(descriptors[-1], rank)
            self._start_source(Path(scratch), descriptors)
            self._watch()
            status = self._end_source()
            if self._writers:
                self._end_writers()
            finalise(self._folder, self._heard, status, time.monotonic() - started)

    # -- children --------------------------------------------------------------------------------------

    def _start_writer(self, ring_fd: int, rank: int) -> None:
        writer = processes.start_writer(ring_fd, self._folder, rank)
        self._writers.append(writer)
        assert writer.stdout is not None
        processes.pump(writer.stdout, rank, self._queue)

    def _start_source(self, scratch: Path, descriptors: Sequence[int]) -> None:
        bridge = scratch / "bridge"
        bridge.mkdir()
        (bridge / "localizer").symlink_to(Path(localizer.__file__).parent)
        work = self._opening.workload
        spec = RunSpec(
            model=work.model.path,
            engine=self._prepared.engine,
            sampling=work.sampling,
            prompts=[schema.token_ids(prompt) for prompt in work.prompts],
            rounds=schema.rounds(work.matrix, work.repeats),
            layers=self._opening.observer.layers,
            level=self._opening.observer.level,
            payload=self._opening.observer.payload,
            row_digest=self._opening.observer.row_digest,
            digest_split=self._opening.observer.digest_split,
            graph_rows=self._opening.observer.graph_rows,
            graph_memory=self._opening.observer.graph_memory,
            sites=list(self._opening.observer.sites),
            weights=self._opening.observer.weights,
            kv_contents=self._opening.observer.kv_contents,
            probes=list(self._opening.observer.probes),
            taps=self._taps,
            intervention=self._prepared.intervention,
            rings=[f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors],
            writer_pids=[writer.pid for writer in self._writers],
            parent_pid=os.getpid(),
        )
        spec.write(scratch / "run.json")
        reading, writing = os.pipe()
        laid, environment = self._prepared.laid, self._prepared.environment
        path = [laid and laid.tree, bridge, environment.get("PYTHONPATH")]
        environment = environment | {
            "PYTHONPATH": os.pathsep.join(str(folder) for folder in path if folder),
            SPEC_VARIABLE: str(scratch / "run.json"),
            EVENTS_VARIABLE: str(writing),
        }
        with (self._folder / schema.LOG).open("wb") as log:
            command = [self._prepared.executable, "-m", PROGRAM]
            self._source = processes.start(command, environment, pass_fds=[writing], stdout=log, stderr=log)
        os.close(writing)
        processes.pump(os.fdopen(reading, "rb"), SOURCE, self._queue)
        self._order(f"group {self._source.pid}")

    def _order(self, text: str) -> None:
        for writer in self._writers:
            if writer.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    writer.stdin.write(text.encode() + b"\n")
                    writer.stdin.flush()

    # -- watching --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Follow the source until it has reported everything."""
        assert self._source is not None
        self._progress.phase("starting vLLM")
        silent = 0  # how often nothing was heard of a source that has ended, whose children hold its pipe
        while self._heard.done is None:
            try:
                name, content = self._queue.get(timeout=0.2)
            except queue.Empty:
                name, content = None, {}
            if name == SOURCE and content is not None:
                self._hear(content)
            elif isinstance(name, int):
                self._hear_writer(name, content)
            silent = silent + 1 if name is None and self._source.poll() is not None else 0
            if (name == SOURCE and content is None) or silent > 5:
                raise self._source_failed()
            self._show()

    def _hear(self, content: dict[str, Any]) -> None:
        match content["event"]:
            case "loading":
                self._progress.phase("loading the model")
            case "ready":
                self._look()
                self._heard.versions, self._heard.engine = content["versions"], content["engine"]
                self._progress.phase("generating")
            case "phase":
                self._heard.phase = content["name"]
                self._progress.phase(f"phase {content['name']}")
            case "round":
                self._heard.round_seconds.append(content["seconds"])
                self._heard.outputs += [msgspec.convert(output, Output) for output in content["outputs"]]
            case "done":
                self._look()
                self._heard.done = content
            case "error":
                self._heard.error = content

    def _hear_writer(self, rank: int, content: dict[str, Any] | None) -> None:
        """Take what the writer of a rank said last; None where it has ended.

        Raises:
            CaptureFailed: it failed, or was killed.
        """
        written = content or self._heard.written.get(rank) or {"event": "failed", "reason": "it was killed"}
        self._heard.written[rank] = written
        if written["event"] != "written":
            raise self._writer_failed(written)

    def _look(self) -> None:
        """Note which shared memory the source uses while it runs."""
        if self._source is not None:
            self._shared.look(self._source.pid)

    def _show(self) -> None:
        steps = self._rings[0].progress[0] if self._rings else 0
        tokens = sum(len(output.tokens) for output in self._heard.outputs)
        work = self._opening.workload
        self._progress.advance(len(self._heard.round_seconds), len(work.matrix) * work.repeats, steps, tokens)

    def _source_failed(self) -> CaptureFailed:
        assert self._source is not None
        log = self._folder / schema.LOG
        self._look()
        status = processes.end_group(self._source)
        cause = likely_cause(log, self._heard.error, status)
        if is_refusal(log, self._heard.error):
            return CaptureFailed(f"The source cannot be observed: {cause}. Its whole output is in {log}.")
        lines = "\n".join(f"  | {line}" for line in last_lines(log))
        phase = f" in phase {self._heard.phase}" if self._heard.phase else ""
        return CaptureFailed(
            f"{lines}\nThe source ended early{phase}: {cause}. Its whole output is in {log}."
        )

    def _writer_failed(self, written: Mapping[str, Any]) -> CaptureFailed:
        if written.get("what") == "disk":
            return _cannot_write(self._folder, written["reason"])
        return CaptureFailed(
            f"The writer of {self._folder} ended early ({written.get('reason', 'unknown')}); "
            "the capture is incomplete: make it again."
        )

    # -- the end ---------------------------------------------------------------------------------------

    def _end_source(self) -> int:
        """Let the source end by itself, then make sure that nothing of it is left."""
        assert self._source is not None
        self._progress.phase("stopping vLLM")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._source.wait(EXIT_SECONDS)
        status = processes.end_group(self._source)
        self._heard.left_processes = len(leftovers.members(self._source.pid))
        self._heard.left_shared_memory = self._shared.clean()
        self._heard.gpu_memory = gpumemory.settled(self._gpu_memory)
        return status

    def _end_writers(self) -> None:
        """Wait until the writers have written what the rings still hold."""
        self._progress.phase("writing the capture")
        self._order("finish")
        while len(self._heard.written) < len(self._writers):
            name, content = self._queue.get()
            if isinstance(name, int):
                self._hear_writer(name, content)
        for rank, writer in enumerate(self._writers):
            self._heard.written[rank]["exit_status"] = writer.wait()

    def stop(self) -> None:
        """End everything at once; the writer keeps what it has."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            if self._source is not None:
                self._look()
                processes.end_group(self._source, grace=2)
                for name, state in self._shared.clean().items():
                    self._progress.phase(f"the run left shared memory: {name} ({state})")
            self._order("finish")
            deadline = time.monotonic() + WRITING_SECONDS
            for writer in self._writers:
                try:
                    writer.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    processes.end_group(writer, grace=0)
        finally:
            signal.signal(signal.SIGINT, before)
