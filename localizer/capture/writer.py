"""The writer process: takes frames from the ring, hashes rows, writes shards; one for each worker.

It runs in localizer's own interpreter. Standard input carries its orders, one a line: `group PGID` names
the source's process group, `finish` says that the source has ended. When the input ends without `finish`,
localize is gone: the writer kills the source, keeps what the ring still holds, and ends. Its last line on
standard output is a JSON object: what was recorded, or the error.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from localizer.errors import LocalizerError
from localizer.store import schema, selection
from localizer.store.digest import XXH3
from localizer.store.phases import phase_of
from localizer.store.reader import Capture
from localizer.store.schema import JOURNAL, Site
from localizer.store.trace import TraceWriter
from localizer.store.writer import RankWriter, StreamError
from localizer.wire import process
from localizer.wire.ring import ENTRY, MESSAGE, Frame, Ring
from localizer.wire.spec import kept_sites

NICENESS = 5
"""On the CPU vLLM's threads wait for each other: one that the writer puts off puts off the whole step."""


class Orders:
    """What localize says on standard input."""

    def __init__(self) -> None:
        self.finished = threading.Event()
        self._group = 0
        threading.Thread(target=self._listen, name="localizer-orders", daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            order, _, argument = line.strip().partition(" ")
            if order == "group":
                self._group = int(argument)
            elif order == "finish":
                self.finished.set()
                return
        if self._group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
        self.finished.set()


class Stream:
    """Applies the frames of one ring to one rank's writer."""

    def __init__(self, folder: Path, rank: int) -> None:
        capture = Capture(folder)
        prompts = [schema.token_ids(capture.prompts[name]) for name in capture.requests]
        observer = capture.open.observer
        self._choice = observer.payload
        self.not_applicable: dict[str, str] = {}
        self.untapped: dict[str, str] = {}
        self.code: dict[str, str] = {}
        self._names: list[str] = []
        phases = phase_of(capture.open)
        names = {name for _, name in phases.values()} or set(capture.requests)
        chosen = selection.parse(observer.rows, observer.transactions, names)
        self.rank = RankWriter(folder, rank, capture.requests, prompts, chosen, phases)
        self.trace = TraceWriter(folder, rank, capture.requests)

    def message(self, content: dict[str, Any]) -> None:
        """Apply one JSON message of the worker."""
        match content.pop("type"):
            case "sites":
                sites = [Site(name=name, rows=rows) for name, rows in content["sites"]]
                self.not_applicable = content["not_applicable"]
                self.untapped = content.get("untapped", {})
                self._names += [site.name for site in sites]
                self.rank.register(sites, kept_sites(content["sites"], self._choice))
            case "site":
                site = Site(name=content["name"], rows=content["rows"])
                self.rank.add_site(site)
                self._names.append(site.name)
            case "absent":
                self.not_applicable.update(content["sites"])
            case "layout":
                digest = content.get("digest", XXH3)
                self.rank.layout(content["site"], content["dtype"], content["shape"], digest)
                if content["code"]:
                    self.code.setdefault(self._names[content["site"]], content["code"])
            case "round":
                self.rank.round(content["names"])
                self.trace.round(content["names"])
            case "step":
                self.rank.begin_step(
                    content["step"],
                    content["requests"],
                    content["counts"],
                    content["tokens"],
                    content["positions"],
                    content["logits"],
                )
            case "draft":
                self.rank.draft_pass(
                    content["requests"],
                    content["counts"],
                    content["tokens"],
                    content["positions"],
                    content["extra"],
                )
            case "end":
                self.rank.end_step(content["sampled"], content.get("proposed"))
            case "trace":
                self.trace.step(content)
            case "contents":
                self.trace.contents(content["keys"], content["values"])
            case other:
                raise StreamError(f"the worker sent the unknown message {other!r}")


def table_of(frame: Frame) -> np.ndarray:
    """The table of a frame of rows, [tensors, ENTRY]."""
    count, start = frame.args[:2]
    return np.frombuffer(frame.body, np.int64, count * ENTRY, start).reshape(count, ENTRY).copy()


def work(ring: Ring, folder: Path, rank: int, orders: Orders) -> dict[str, Any]:
    """Take frames until the ring is closed or the source is gone; return the summary or the error."""
    try:
        stream = Stream(folder, rank)
        for frame in ring.frames(orders.finished.is_set):
            if frame.kind == MESSAGE:
                content = json.loads(bytes(frame.body))
                if content["type"] == "round":  # the worker has mapped the ring by then
                    ring.warm()
                stream.message(content)
            else:
                stream.rank.frame(table_of(frame), frame.body)
        summary = asdict(stream.rank.close())
        summary["counts"]["traced_steps"] = stream.trace.close()
    except Exception as error:  # whatever it is, the worker must not wait and localize must hear of it
        ring.fail()
        return {"event": "failed", **_why(error)}
    summary["sites"] = msgspec.to_builtins(summary["sites"])
    used = {"peak_memory": process.peak_memory(), "seconds": process.age()}
    journal = (folder / JOURNAL).stat().st_size
    absent = {"not_applicable": stream.not_applicable, "untapped": stream.untapped, "code": stream.code}
    return {"event": "written", "journal": journal, **used, **absent, **summary}


def _why(error: Exception) -> dict[str, str]:
    """What failed, "disk" or "stream", and the reason."""
    if isinstance(error, OSError):
        return {"what": "disk", "reason": error.strerror or str(error)}
    known = isinstance(error, (StreamError, LocalizerError))
    return {"what": "stream", "reason": str(error) if known else f"{type(error).__name__}: {error}"}


def main() -> None:
    """`python -m localizer.capture.writer RING_FD FOLDER RANK`."""
    os.nice(NICENESS)
    gc.set_threshold(1 << 20)  # a step's rows are thousands of objects at a time, and no garbage
    with contextlib.suppress(OSError):  # as in a sandbox; its waking then puts off a thread of vLLM's
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    ring_fd, folder, rank = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    result = work(Ring(ring_fd), folder, rank, Orders())
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
