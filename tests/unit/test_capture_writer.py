"""The writer process turns the frames of a ring into shards, and ends in a clear way whatever happens."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Plan, write

from localizer.capture.writer import work
from localizer.store.reader import Capture
from localizer.wire import ring as rings
from localizer.wire.ring import MESSAGE, ROWS, Ring, RingError
from localizer.wire.spec import INPUT_IDS

QUERY, LOGITS, TOKEN = "model.layers.0.self_attn.attn/query", "lm_head/logits", "sampler/token"


class Worker:
    """The producing end: what a worker inside vLLM would send."""

    def __init__(self) -> None:
        self.fd = rings.create(1 << 16)
        self.ring = Ring(self.fd)

    def say(self, **content: Any) -> None:
        self.put(MESSAGE, json.dumps(content).encode())

    def rows(self, *arrays: tuple[int, np.ndarray]) -> None:
        """Rows of several sites in one frame."""
        body, table = b"", b""
        for site, array in arrays:
            width = array.nbytes // len(array)
            table += struct.pack("=6q", site, 0, len(array), width, width, len(body))
            body += array.tobytes()
        self.put(ROWS, body + table, (len(arrays), len(body)))

    def put(self, kind: int, body: bytes, args: tuple[int, ...] = ()) -> None:
        offset = self.ring.reserve(len(body), patience=0.1)
        self.ring.buffer[offset : offset + len(body)] = body
        self.ring.commit(kind, len(body), args)

    def begin(self) -> None:
        """Sites, layouts and the only round of a workload with one request."""
        sites = [(INPUT_IDS, "all"), (QUERY, "all"), (LOGITS, "logits"), (TOKEN, "tokens")]
        self.say(type="sites", sites=sites, not_applicable={"x/key": "shared"})
        for site, dtype, shape in ((0, "int32", []), (1, "bfloat16", [2]), (2, "float32", [3])):
            self.say(type="layout", site=site, dtype=dtype, shape=shape, code="")
        self.say(type="round", names={"0-abc": "r00.00"})

    def step(self, number: int, tokens: list[int], first: int, sampled: list[int]) -> None:
        positions = list(range(first, first + len(tokens)))
        self.say(
            type="step", step=number, requests=["0-abc"], counts=[len(tokens)],
            tokens=tokens, positions=positions, logits=[1],
        )  # fmt: skip
        self.rows(
            (0, np.array(tokens, np.int32)),
            (1, np.full((len(tokens), 2), number, np.uint16)),
            (2, np.full((1, 3), number, np.float32)),
        )
        self.say(type="end", sampled={"0-abc": sampled})


class Orders:
    """What localize says, for `work` in this process."""

    def __init__(self) -> None:
        self.finished = threading.Event()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.ring.unmap()
    os.close(worker.fd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plan = Plan(prompts=((1, 2, 3),), matrix=(1,), max_tokens=2, manifest=False, only_tokens=True)
    return write(tmp_path, plan)


def serve(worker: Worker, folder: Path, *, finished: bool = False) -> dict[str, Any]:
    orders = Orders()
    if finished:
        orders.finished.set()
    ring = Ring(worker.fd)
    result = work(ring, folder, 0, orders)  # type: ignore[arg-type]
    ring.unmap()
    return result


def test_a_run_becomes_shards(worker: Worker, folder: Path) -> None:
    worker.begin()
    worker.step(0, [1, 2, 3], 0, [7])
    worker.step(1, [7], 3, [8])
    worker.ring.close()
    result = serve(worker, folder)
    assert result["event"] == "written"
    assert (result["not_applicable"], result["complaints"]) == ({"x/key": "shared"}, [])
    assert result["expected"] == result["recorded"] == {INPUT_IDS: 4, QUERY: 4, LOGITS: 2, TOKEN: 2}
    assert result["sites"][1] == {
        "name": QUERY,
        "rows": "all",
        "dtype": "bfloat16",
        "shape": (2,),
        "digest": "xxh3-128",
    }
    json.dumps(result)
    capture = Capture(folder)
    capture.check()
    assert capture.outputs == {"r00.00": [7, 8]}
    assert capture.table.columns["step"].tolist() == [0, 0, 0, 1]
    kept = capture.row_payload(QUERY, 3)
    assert kept is not None
    assert kept.view(np.uint16).tolist() == [1, 1]


def test_a_source_that_was_killed_leaves_what_it_sent(worker: Worker, folder: Path) -> None:
    worker.begin()
    worker.step(0, [1, 2, 3], 0, [7])
    worker.say(type="step", step=1, requests=["0-abc"], counts=[1], tokens=[7], positions=[3], logits=[1])
    result = serve(worker, folder, finished=True)
    assert result["complaints"] == ["the last step was cut off"]
    capture = Capture(folder)
    capture.check()
    assert (len(capture.table), capture.outputs) == (3, {"r00.00": [7]})


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        (MESSAGE, b'{"type": "song"}', "the worker sent the unknown message 'song'"),
        (
            MESSAGE,
            b'{"type": "layout", "site": 0, "dtype": "complex64", "shape": []}',
            "unknown dtype complex64",
        ),
        (MESSAGE, b'{"type": "end", "sampled": {}}', "had not begun"),
        (MESSAGE, b'{"type": "round"}', "KeyError: 'names'"),
        (MESSAGE, b'{"type": "round", "names": {"a": "r99.00"}}', "KeyError: 'r99.00'"),
        (MESSAGE, b"{", "JSONDecodeError"),
        (ROWS, struct.pack("=6q", 0, 0, 1, 4, 4, 0), "outside a step"),
    ],
)
def test_a_stream_that_makes_no_sense_ends_the_writer(
    worker: Worker, folder: Path, kind: int, body: bytes, reason: str
) -> None:
    worker.begin()
    worker.put(kind, body, (1, 0))
    result = serve(worker, folder)
    assert (result["event"], result["what"]) == ("failed", "stream")
    assert reason in result["reason"]
    with pytest.raises(RingError, match="the writer has failed"):
        worker.begin()


def test_a_full_disk_ends_the_writer(worker: Worker, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    worker.begin()
    worker.step(0, [1, 2, 3], 0, [7])
    worker.ring.close()
    monkeypatch.setattr(os, "fsync", full)
    assert serve(worker, folder) == {"event": "failed", "what": "disk", "reason": "No space left on device"}


# -- the process itself -----------------------------------------------------------------------------------


def start(worker: Worker, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "localizer.capture.writer", str(worker.fd), str(folder), "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[worker.fd],
    )


def test_the_process_ends_when_it_is_told_that_the_source_has_ended(worker: Worker, folder: Path) -> None:
    process = start(worker, folder)
    worker.begin()
    worker.step(0, [1, 2, 3], 0, [7])
    output, _ = process.communicate("finish\n", timeout=60)
    assert process.returncode == 0
    assert json.loads(output)["recorded"][QUERY] == 3


def test_the_process_kills_the_source_when_localize_is_gone(worker: Worker, folder: Path) -> None:
    """Its standard input ends without `finish`; what the ring held is kept."""
    source = subprocess.Popen(["sleep", "600"], start_new_session=True)
    process = start(worker, folder)
    assert process.stdin is not None
    worker.begin()
    worker.step(0, [1, 2, 3], 0, [7])
    output, _ = process.communicate(f"group {source.pid}\n", timeout=60)
    assert source.wait(timeout=60) == -signal.SIGKILL
    assert json.loads(output)["event"] == "written"
    assert len(Capture(folder).table) == 3
