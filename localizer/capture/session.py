"""One capture from beginning to end: prepare, launch, watch, stop, finalise."""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec

import localizer
from localizer.capture import processes
from localizer.capture.diagnose import last_lines, likely_cause
from localizer.errors import CaptureFailed, Interrupted, LocalizerError
from localizer.sources import interpreter, overlay
from localizer.store import names, schema, tensors
from localizer.store.schema import Coverage, Manifest, Open, Output, Shard, Site
from localizer.wire import ring as rings
from localizer.wire.spec import EVENTS_VARIABLE, PROGRAM, SPEC_VARIABLE, RunSpec, parse_indices
from localizer.workload import models, plan

BUFFER_BYTES = 256 << 20
"""Capacity of the ring between the worker and the writer."""

EXIT_SECONDS = 60.0
"""How long a source that has reported everything may take to end by itself."""

RECORDED = (
    *("VLLM_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "NCCL_"),
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_", "LD_PRELOAD"),
)
"""Prefixes of the environment variables that are recorded."""

SECRET = re.compile(r"(_KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$", re.IGNORECASE)
"""Names of those whose values stay out of the capture: captures are attached to public comments."""

MOST_LAYERS = 10_000
"""More attention layers than any model has; how many this one has is known when it is loaded."""

SET = {"VLLM_NO_USAGE_STATS": "1", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
"""Environment variables given to every source unless the person sets them: no telemetry, no stray imports."""


@dataclass(frozen=True)
class CaptureRequest:
    """What to capture, as the person said it."""

    name: str
    root: Path
    model: str
    python: str = sys.executable
    overlay: Path | None = None
    matrix: str = plan.MATRIX
    repeats: int = 2
    prompt_tokens: int = 16
    max_tokens: int = 64
    seed: int = 0
    layers: str = "all"
    payload: str = "first"
    engine: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    taps: bool = True


class Progress(Protocol):
    """What a capture tells while it runs."""

    def phase(self, text: str) -> None:
        """A phase begins."""

    def advance(self, rounds: int, of: int, steps: int, tokens: int) -> None:
        """Rounds finished, steps recorded, tokens returned so far."""


@dataclass
class _Run:
    """What was heard from the children so far."""

    outputs: list[Output] = field(default_factory=list)
    rounds: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    done: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    written: dict[str, Any] | None = None


def capture(request: CaptureRequest, progress: Progress) -> Path:
    """Make a capture and return its folder.

    Raises:
        LocalizerError: the request is unusable; nothing was started.
        CaptureFailed: the source or the disk failed; the incomplete capture is kept and named.
        Interrupted: the person stopped it; likewise.
    """
    environment = source_environment(request)
    progress.phase("looking at the source")
    python, tree, opening = _prepare(request, environment)
    folder, number = names.new_folder(request.root, request.name)
    opening = msgspec.structs.replace(opening, number=number)
    try:
        tensors.replace(folder / schema.OPEN, schema.encode(opening))
        (folder / schema.JOURNAL).touch()
        (folder / schema.LOG).touch()
    except OSError as error:
        raise LocalizerError(
            f"{folder} cannot be written ({error.strerror}); name another folder with --out."
        ) from None
    session = _Session(request, progress, folder, opening, python, tree, environment)
    with _interruptible():
        try:
            session.run()
        except KeyboardInterrupt:
            session.stop()
            raise Interrupted(f"Stopped; what was recorded so far is in {folder}, incomplete.") from None
        except OSError as error:
            session.stop()
            raise CaptureFailed(
                f"{folder} cannot be written ({error.strerror}); "
                "free some space or name another folder with --out."
            ) from None
        except BaseException:
            session.stop()
            raise
    return folder


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


def source_environment(request: CaptureRequest) -> dict[str, str]:
    """The environment the source runs with, but for PYTHONPATH's additions."""
    return {**SET, **os.environ, **request.environment}


def recorded_environment(environment: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """The variables that choose what vLLM does, and those `given` by the person, without secrets."""
    return {
        key: "(not recorded)" if SECRET.search(key) else value
        for key, value in sorted(environment.items())
        if key.startswith(RECORDED) or key in given
    }


def _prepare(
    request: CaptureRequest, environment: dict[str, str]
) -> tuple[interpreter.Interpreter, Path | None, Open]:
    """Check the request and describe it, before anything is written."""
    matrix = plan.parse_matrix(request.matrix)
    if min(request.repeats, request.prompt_tokens, request.max_tokens) < 1:
        raise LocalizerError("Repeats, prompt tokens and new tokens must be at least 1; check the numbers.")
    try:
        parse_indices(request.layers, MOST_LAYERS)
    except ValueError as error:
        raise LocalizerError(f"--layers {request.layers!r}: {error}; write first, all, or 0,5-9.") from None
    if "worker_extension_cls" in request.engine and request.taps:
        raise LocalizerError(
            "The observer is the worker extension; leave worker_extension_cls out of --engine."
        )
    model = models.resolve(request.model)
    python = interpreter.probe(request.python, environment)
    tree, laid = None, None
    if request.overlay is not None:
        tree, replaced = overlay.lay(request.overlay, python.vllm_location)
        laid = schema.Overlay(path=str(request.overlay.resolve()), files=replaced)
    prompts = plan.draw_prompts(
        max(matrix), request.prompt_tokens, plan.vocabulary(Path(model.path)), request.seed
    )
    opening = Open(
        format=schema.FORMAT,
        schema=schema.SCHEMA,
        name=request.name,
        number=0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        localizer=localizer.__version__,
        host={"name": platform.node(), "system": platform.platform(), "processor": platform.machine()},
        source=schema.Source(
            python=python.executable,
            python_version=python.python,
            vllm=python.vllm,
            vllm_location=str(python.vllm_location),
            torch=python.torch,
            overlay=laid,
            packages=python.packages,
        ),
        workload=schema.Workload(
            model=schema.Model(name=model.name, path=model.path, files=model.files),
            matrix=matrix,
            repeats=request.repeats,
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            seed=request.seed,
            prompts=prompts,
            sampling=plan.greedy(request.max_tokens),
            engine=dict(request.engine),
        ),
        environment=recorded_environment(environment, request.environment),
        observer=schema.Observer(
            taps=request.taps,
            layers=request.layers,
            payload=request.payload if request.taps else "none",
            changes=observer_changes(request),
        ),
    )
    return python, tree, opening


def observer_changes(request: CaptureRequest) -> list[str]:
    """Everything that is not as in a run without localizer."""
    changes = [f"environment: {key}={value}" for key, value in SET.items() if key not in os.environ]
    changes += [
        "environment: PYTHONPATH begins with localizer's bridge",
        "admission: a round's requests are queued while the engine sleeps (level 0), then it wakes",
    ]
    if request.taps:
        changes += [
            "engine: worker_extension_cls names localizer's extension",
            "worker: forward of the tapped attention implementations, compute_logits of the model and "
            "execute_model and sample_tokens of the runner are wrapped; the model has a forward pre-hook",
            f"memory: a shared ring of {BUFFER_BYTES >> 20} MiB, and a writer process",
        ]
    return changes


class _Session:
    """The children of one capture."""

    def __init__(
        self,
        request: CaptureRequest,
        progress: Progress,
        folder: Path,
        opening: Open,
        python: interpreter.Interpreter,
        tree: Path | None,
        environment: dict[str, str],
    ) -> None:
        self._progress, self._folder, self._opening, self._python = progress, folder, opening, python
        self._taps, self._tree, self._environment = request.taps, tree, environment
        self._heard: queue.Queue[tuple[str, dict[str, Any] | None]] = queue.Queue()
        self._run = _Run()
        self._source: subprocess.Popen[bytes] | None = None
        self._writer: subprocess.Popen[bytes] | None = None
        self._ring: rings.Ring | None = None

    def run(self) -> None:
        """Launch, watch, and finalise.

        Raises:
            CaptureFailed: a child failed.
        """
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="localizer-") as scratch, contextlib.ExitStack() as stack:
            ring_fd = rings.create(BUFFER_BYTES)
            stack.callback(os.close, ring_fd)
            self._ring = rings.Ring(ring_fd)
            stack.callback(self._ring.unmap)
            if self._taps:
                self._start_writer(ring_fd)
            self._start_source(Path(scratch), ring_fd)
            self._watch()
            status = self._end_source()
            if self._taps:
                self._end_writer()
            self._finalise(status, time.monotonic() - started)

    # -- children --------------------------------------------------------------------------------------

    def _start_writer(self, ring_fd: int) -> None:
        command = [sys.executable, "-m", "localizer.capture.writer", str(ring_fd), str(self._folder), "0"]
        package = str(Path(localizer.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        self._writer = processes.start(
            command,
            {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            pass_fds=[ring_fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._writer.stdout is not None
        processes.pump(self._writer.stdout, "writer", self._heard)

    def _start_source(self, scratch: Path, ring_fd: int) -> None:
        bridge = scratch / "bridge"
        bridge.mkdir()
        (bridge / "localizer").symlink_to(Path(localizer.__file__).parent)
        work = self._opening.workload
        spec = RunSpec(
            model=work.model.path,
            engine=work.engine,
            sampling=work.sampling,
            prompts=work.prompts,
            rounds=schema.rounds(work.matrix, work.repeats),
            layers=self._opening.observer.layers,
            taps=self._taps,
            ring=f"/proc/{os.getpid()}/fd/{ring_fd}",
            writer_pid=self._writer.pid if self._writer else 0,
            parent_pid=os.getpid(),
        )
        spec.write(scratch / "run.json")
        reading, writing = os.pipe()
        first = [str(path) for path in (self._tree, bridge) if path is not None]
        environment = self._environment | {
            "PYTHONPATH": os.pathsep.join(filter(None, [*first, self._environment.get("PYTHONPATH", "")])),
            SPEC_VARIABLE: str(scratch / "run.json"),
            EVENTS_VARIABLE: str(writing),
        }
        with (self._folder / schema.LOG).open("wb") as log:
            command = [self._python.executable, "-m", PROGRAM]
            self._source = processes.start(command, environment, pass_fds=[writing], stdout=log, stderr=log)
        os.close(writing)
        processes.pump(os.fdopen(reading, "rb"), "source", self._heard)
        self._order(f"group {self._source.pid}")

    def _order(self, text: str) -> None:
        if self._writer is not None and self._writer.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._writer.stdin.write(text.encode() + b"\n")
                self._writer.stdin.flush()

    # -- watching --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Follow the source until it has reported everything."""
        assert self._source is not None
        self._progress.phase("starting vLLM")
        while self._run.done is None:
            try:
                name, content = self._heard.get(timeout=0.2)
            except queue.Empty:
                name, content = "", {}
            if name == "source" and content is not None:
                self._hear(content)
            elif name == "writer":
                self._run.written = content
                raise self._writer_failed()
            elif name == "source" or (not name and self._source.poll() is not None):
                self._drain_events()
                if self._run.done is None:
                    raise self._source_failed()
            self._show()

    def _hear(self, content: dict[str, Any]) -> None:
        match content["event"]:
            case "loading":
                self._progress.phase("loading the model")
            case "ready":
                self._run.versions = content["versions"]
                self._progress.phase("generating")
            case "round":
                self._run.rounds += 1
                self._run.outputs += [msgspec.convert(output, Output) for output in content["outputs"]]
            case "done":
                self._run.done = content
            case "error":
                self._run.error = content

    def _drain_events(self) -> None:
        """Hear what the source said before it ended."""
        deadline = time.monotonic() + 2
        while self._run.done is None and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                name, content = self._heard.get(timeout=0.2)
                if name == "source" and content is not None:
                    self._hear(content)

    def _show(self) -> None:
        assert self._ring is not None
        tokens = sum(len(output.tokens) for output in self._run.outputs)
        work = self._opening.workload
        self._progress.advance(
            self._run.rounds, len(work.matrix) * work.repeats, self._ring.progress[0], tokens
        )

    def _source_failed(self) -> CaptureFailed:
        assert self._source is not None
        log = self._folder / schema.LOG
        status = processes.end_group(self._source)
        lines = "\n".join(f"  | {line}" for line in last_lines(log))
        cause = likely_cause(log, self._run.error, status)
        return CaptureFailed(f"{lines}\nThe source ended early: {cause}. Its whole output is in {log}.")

    def _writer_failed(self) -> CaptureFailed:
        written = self._run.written or {"what": "", "reason": "it was killed"}
        if written.get("what") == "disk":
            return CaptureFailed(
                f"{self._folder} cannot be written ({written['reason']}); "
                "free some space or name another folder with --out."
            )
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
        return processes.end_group(self._source)

    def _end_writer(self) -> None:
        """Wait until the writer has written what the ring still holds."""
        self._progress.phase("writing the capture")
        self._order("finish")
        while self._run.written is None:
            name, content = self._heard.get()
            if name == "writer":
                self._run.written = content or {"event": "failed", "reason": "it was killed"}
        assert self._writer is not None
        self._writer.wait()
        if self._run.written["event"] != "written":
            raise self._writer_failed()

    def stop(self) -> None:
        """End everything at once; the writer keeps what it has."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            if self._source is not None:
                processes.end_group(self._source, grace=2)
            if self._writer is not None:
                self._order("finish")
                try:
                    self._writer.wait(30)
                except subprocess.TimeoutExpired:
                    processes.end_group(self._writer, grace=0)
        finally:
            signal.signal(signal.SIGINT, before)

    def _finalise(self, status: int, seconds: float) -> None:
        """Write the manifest: the capture is finished."""
        run, done = self._run, self._run.done or {}
        written = run.written or {}
        workers = done.get("workers", [])
        coverage = {
            site: Coverage(expected=expected, recorded=written["recorded"][site])
            for site, expected in written.get("expected", {}).items()
        }
        reasons = incomplete_reasons(coverage, written, workers)
        journal = (self._folder / schema.JOURNAL).read_bytes().splitlines()
        shards = [msgspec.json.decode(line, type=Shard) for line in journal]
        documents = [_describe(self._folder, name) for name in (schema.OPEN, schema.JOURNAL, schema.LOG)]
        manifest = Manifest(
            format=schema.FORMAT,
            schema=schema.SCHEMA,
            state="incomplete" if reasons else "complete",
            reasons=reasons,
            outputs=run.outputs,
            sites=[msgspec.convert(site, Site) for site in written.get("sites", [])],
            coverage=coverage,
            not_applicable=written.get("not_applicable", {}),
            counts={
                **written.get("counts", {}),
                "dummy_forwards": sum(worker["dummies"] for worker in workers),
                "exit_status": status,
            },
            engine={**(workers[0]["engine"] if workers else {}), "versions": run.versions},
            durations={**done.get("durations", {}), "total": seconds},
            peak_memory_bytes={
                "program": done.get("peak_memory", 0),
                "writer": written.get("peak_memory", 0),
                **{f"worker-{rank}": worker["peak_memory"] for rank, worker in enumerate(workers)},
            },
            files=[*documents, *shards],
        )
        tensors.replace(self._folder / schema.MANIFEST, schema.encode(manifest))


def incomplete_reasons(
    coverage: Mapping[str, Coverage], written: Mapping[str, Any], workers: list[dict[str, Any]]
) -> list[str]:
    """Why a finished run did not leave all it should have; empty if it did."""
    reasons = [error for worker in workers for error in worker["errors"]]
    reasons += written.get("complaints", [])
    short = {site: rows for site, rows in coverage.items() if rows.recorded != rows.expected}
    if short:
        site, rows = next(iter(short.items()))
        reasons.append(
            f"rows are missing at {len(short)} of {len(coverage)} sites, "
            f"first at {site}: {rows.recorded} of {rows.expected}"
        )
    counts = written.get("counts", {})
    if counts.get("rows_without_prefix"):
        reasons.append(
            f"{counts['rows_without_prefix']} rows have tokens before them that no row and no prompt gives"
        )
    if counts.get("prompt_mismatches"):
        reasons.append(
            f"{counts['prompt_mismatches']} rows have an input id that is not the prompt's token there"
        )
    return reasons


def _describe(folder: Path, name: str) -> Shard:
    path = folder / name
    return Shard(name=name, size=path.stat().st_size, xxh3_128=tensors.file_digest(path))
