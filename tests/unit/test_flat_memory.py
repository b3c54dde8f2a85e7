"""However long a run is, what worker and writer hold stays bounded: shown by counts, without a clock.

A recorder and the writer's loop work through a real ring, in two threads of this process, so that one trace
of memory covers both ends.
"""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders import Plan, write

torch = pytest.importorskip("torch")

from localizer.capture.writer import work  # noqa: E402 - needs torch
from localizer.hooks.recorder import Recorder  # noqa: E402
from localizer.hooks.sink import Sink  # noqa: E402
from localizer.store import writer as writers  # noqa: E402
from localizer.store.reader import Capture  # noqa: E402
from localizer.store.schema import request_name  # noqa: E402
from localizer.store.writer import RankWriter  # noqa: E402
from localizer.wire import ring as rings  # noqa: E402
from localizer.wire.ring import CONTROL_BYTES, Ring  # noqa: E402
from localizer.wire.spec import INPUT_IDS, POSITIONS, TOKEN  # noqa: E402

PROMPTS = ((1, 2, 3), (4, 5, 6))
ROUNDS, NEW = 60, 16
ROWS_A_ROUND = len(PROMPTS) * (3 + NEW - 1)

QUERY, WIDTH = "model.layers.0.self_attn.attn/query", 128
STEP_BYTES = len(PROMPTS) * 3 * WIDTH * 4
"""Bytes of the query rows of the largest step, the one with the prompts."""

CAPACITY = 1 << 15
SHARD_ROWS, SHARD_BYTES = 128, 1 << 14


@dataclass
class Watched:
    """What was seen whenever a step was finished.

    Attributes:
        memory: bytes that Python and numpy held, of both ends.
        objects: how many objects there were that refer to others, at the ends of rounds.
        ahead: steps by which the worker was ahead of the writer.
        steps: how many there were.
    """

    memory: np.ndarray = field(default_factory=lambda: np.zeros(ROUNDS * NEW, np.int64))
    objects: np.ndarray = field(default_factory=lambda: np.zeros(ROUNDS, np.int64))
    ahead: np.ndarray = field(default_factory=lambda: np.zeros(ROUNDS * NEW, np.int64))
    steps: int = 0


def generate(recorder: Recorder) -> None:
    """What the taps tell a recorder during a run of `ROUNDS` rounds."""
    recorder.register([(INPUT_IDS, "all"), (POSITIONS, "all"), (QUERY, "all"), (TOKEN, "tokens")], {}, {})
    for number in range(ROUNDS):
        internal = [f"{number * len(PROMPTS) + index}-ab" for index in range(len(PROMPTS))]
        recorder.round({name: request_name(number, index) for index, name in enumerate(internal)})
        for place in range(NEW):
            count = len(PROMPTS[0]) if place == 0 else 1
            tokens = [token for prompt in PROMPTS for token in (prompt if place == 0 else (place,))]
            first = 0 if place == 0 else len(PROMPTS[0]) + place - 1
            positions = [first + index for _ in PROMPTS for index in range(count)]
            recorder.schedule(
                SimpleNamespace(
                    num_scheduled_tokens=dict.fromkeys(internal, count),
                    total_num_scheduled_tokens=len(tokens),
                    scheduled_spec_decode_tokens={},
                )
            )
            recorder.forward_begins(internal, torch.tensor(tokens), torch.tensor(positions))
            recorder.rows(QUERY, torch.full((len(tokens), WIDTH), float(place)))
            recorder.forward_ended()
            recorder.sampled(internal, [[place + 1]] * len(PROMPTS))
    recorder.finish()
    assert recorder.errors == []


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Watched, Capture]]:
    """A long run, watched at every step, and the capture that it left."""
    plan = Plan(prompts=PROMPTS, matrix=(len(PROMPTS),), repeats=ROUNDS, manifest=False, only_tokens=True)
    folder = write(tmp_path_factory.mktemp("long"), plan)
    ring_fd = rings.create(CAPACITY)
    ring, sink = Ring(ring_fd), Sink(Ring(ring_fd), os.getpid())
    seen, finish = Watched(), RankWriter.end_step

    def end_step(self: RankWriter, *args: Any, **kwargs: Any) -> None:
        seen.ahead[seen.steps] = ring.progress[0] - seen.steps
        finish(self, *args, **kwargs)
        seen.memory[seen.steps] = tracemalloc.get_traced_memory()[0]
        seen.steps += 1
        if seen.steps % NEW == 0:
            seen.objects[seen.steps // NEW - 1] = len(gc.get_objects())

    patch = pytest.MonkeyPatch()
    patch.setattr(RankWriter, "end_step", end_step)
    patch.setattr(writers, "SHARD_ROWS", SHARD_ROWS)
    patch.setattr(writers, "SHARD_BYTES", SHARD_BYTES)
    worker = threading.Thread(target=generate, args=(Recorder(sink),))
    tracemalloc.start()
    worker.start()
    try:
        orders = SimpleNamespace(finished=threading.Event())
        report = work(ring, folder, 0, orders)  # type: ignore[arg-type]
    finally:
        worker.join()
        tracemalloc.stop()
        patch.undo()
    assert (report["event"], report["complaints"]) == ("written", [])
    assert os.fstat(ring_fd).st_size == CONTROL_BYTES + CAPACITY
    os.close(ring_fd)
    yield seen, Capture(folder)
    ring.unmap()


def test_nothing_is_lost_in_a_ring_much_smaller_than_the_run(watched: tuple[Watched, Capture]) -> None:
    seen, capture = watched
    assert seen.steps == ROUNDS * NEW
    assert len(capture.table) == ROUNDS * ROWS_A_ROUND
    assert capture.table.present[:].all(0).tolist() == [
        True,
        True,
        True,
        False,
    ]  # tokens are not on every row
    assert ROUNDS * ROWS_A_ROUND * WIDTH * 4 > 30 * CAPACITY


def test_the_worker_waits_where_the_ring_is_full(watched: tuple[Watched, Capture]) -> None:
    """How far it is ahead depends on the ring, not on the run."""
    seen, _ = watched
    least = len(PROMPTS) * WIDTH * 4  # bytes of a step's query rows at least
    assert max(seen.ahead) <= CAPACITY // least + 1


def test_the_writer_holds_one_shard_and_one_step(watched: tuple[Watched, Capture]) -> None:
    _, capture = watched
    sizes = {Path(file.name).name: file.size for file in capture.files if "-0" in file.name}
    payload = [size for name, size in sizes.items() if name.startswith("payload")]
    assert len(payload) > 30
    other = SHARD_ROWS * 64  # of the narrow sites, row indices and the header
    assert max(payload) <= SHARD_BYTES + STEP_BYTES + other


@pytest.mark.parametrize("what", ["memory", "objects"])
def test_the_second_half_of_a_run_holds_no_more_than_the_first(
    watched: tuple[Watched, Capture], what: str
) -> None:
    counts = getattr(watched[0], what)
    settled = counts[len(counts) // 6 :]  # what is made once, as layouts and caches, is there by now
    half = len(settled) // 2
    more = {"memory": 1.15, "objects": 1.001}[what]  # Python keeps some of what it frees for later
    assert settled[half:].max() <= settled[:half].max() * more
