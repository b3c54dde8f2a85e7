"""The schedule trace is written as it is told, read with suspicion, and must fit the rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from altered import SMALL, describe, edit, small
from builders import Plan, write

from localizer.errors import DamagedCapture
from localizer.store import trace
from localizer.store.reader import Capture
from localizer.store.schema import DRAFT_PADDING
from localizer.store.steps import StreamError
from localizer.store.trace import StepTrace, TraceWriter
from localizer.store.verify import verify

TRACED = replace(SMALL, traced=True)
STEPS = "rank-0/steps-00000.jsonl"
FORMAT = (Path(__file__).parents[2] / "docs" / "capture-format.md").read_text()


def told(step: int = 0, **changes: Any) -> dict[str, Any]:
    """What a worker tells of a step of two requests."""
    fields: dict[str, Any] = {
        **{"step": step, "requests": ["b", "a"], "scheduled": [2, 1], "computed": [0, 7], "cached": [0, 0]},
        **{"drafts": [0, 0], "resumed": ["a"], "preempted": [], "finished": ["gone", "a"], "padded": 8},
        **{"graph": "FULL", "batch": {"num_reqs": None, "uniform": True}, "backend": {"scale": 0.5}},
        **{"blocks": ["01", "02"], "slots": None},
    }
    return fields | changes


@pytest.fixture
def writer(tmp_path: Path) -> TraceWriter:
    (tmp_path / "rank-0").mkdir()
    (tmp_path / "journal.jsonl").touch()
    found = TraceWriter(tmp_path, 0, ["r00.00", "r00.01"])
    found.round({"a": "r00.00", "b": "r00.01"})
    return found


def test_what_is_told_is_read(tmp_path: Path, writer: TraceWriter) -> None:
    writer.step(told())
    writer.contents({"layer": ["k1", "k2"]}, {"layer": ["v1", "v2"]})
    writer.step(told(3, resumed=[], finished=[]))
    assert writer.close() == 2
    first, second = trace.read(tmp_path / STEPS, 2)
    assert (first.requests, first.resumed, first.finished) == ([1, 0], [0], [0])
    assert (first.scheduled, first.computed, first.padded, first.graph) == ([2, 1], [0, 7], 8, "FULL")
    assert (first.batch, first.backend) == ({"num_reqs": None, "uniform": True}, {"scale": 0.5})
    assert (first.blocks, first.slots) == (["01", "02"], None)
    assert (first.keys, first.values) == ({"layer": ["k1", "k2"]}, {"layer": ["v1", "v2"]})
    assert (second.step, second.keys, second.resumed) == (3, {}, [])
    (line,) = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert json.loads(line)["name"] == STEPS


def test_shards_are_closed(tmp_path: Path, writer: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "SHARD_STEPS", 2)
    for number in range(5):
        writer.step(told(number))
    assert [path.name for path in sorted((tmp_path / "rank-0").iterdir())] == [
        "steps-00000.jsonl",
        "steps-00001.jsonl",
    ]  # what a kill would leave
    assert writer.close() == 5
    assert len(trace.read(tmp_path / "rank-0" / "steps-00002.jsonl", 2)) == 1


@pytest.mark.parametrize(
    "wrong", [{"scheduled": [1]}, {"padded": -1}, {"requests": ["a", "unknown"]}, {"backend": {"x": [1]}}]
)
def test_a_worker_that_contradicts_itself(writer: TraceWriter, wrong: dict[str, Any]) -> None:
    writer.step(told(**wrong))
    with pytest.raises(StreamError, match="the trace of a step cannot be used"):
        writer.close()


def test_every_field_is_described() -> None:
    fields = [field.name for field in msgspec.structs.fields(StepTrace)]
    assert [name for name in fields if f"`{name}`" not in FORMAT] == []


# -- a whole capture --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", [TRACED, replace(TRACED, chunk=1, repeats=2), Plan(traced=True, speculate=2)]
)
def test_a_traced_capture_is_sound(tmp_path: Path, plan: Plan) -> None:
    folder = write(tmp_path, plan)
    assert verify(folder).reasons == []
    capture = Capture(folder)
    rows = capture.table.columns
    assert sum(sum(step.scheduled) for step in capture.steps) == int((rows["kind"] < DRAFT_PADDING).sum())


def test_a_capture_without_a_trace_has_no_steps(tmp_path: Path) -> None:
    capture = Capture(small(tmp_path))
    assert capture.steps == []


def test_a_killed_run_keeps_its_trace(tmp_path: Path) -> None:
    folder = write(tmp_path, replace(TRACED, manifest=False))
    assert len(Capture(folder).steps) == 4
    assert verify(folder).state == "incomplete"


def change(folder: Path, number: int, **fields: Any) -> None:
    """Change a line of the trace, and let journal and manifest agree."""
    path = folder / STEPS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[number] |= fields
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    describe(folder)


@pytest.mark.parametrize(
    ("number", "fields", "why"),
    [
        (1, {"scheduled": [2]}, "the rows of 1 steps are not those that were scheduled, first in step 1"),
        (0, {"requests": [1]}, "the rows of 1 steps are not those that were scheduled, first in step 0"),
        (0, {"requests": [3]}, "line 1 (it names a request that the workload does not have)"),
        (0, {"finished": [3]}, "line 1 (it names a request that the workload does not have)"),
        (3, {"step": 2}, "line 4 (its step does not follow the one before)"),
        (0, {"scheduled": [1, 1]}, "line 1 (its lists do not have one item for each request)"),
        (0, {"padded": 1 << 70}, "line 1 ("),
        (0, {"batch": {"x": {}}}, "line 1 ("),
    ],
)
def test_a_trace_that_was_altered(tmp_path: Path, number: int, fields: dict[str, Any], why: str) -> None:
    folder = write(tmp_path, TRACED)
    change(folder, number, **fields)
    result = verify(folder)
    assert result.state == "damaged"
    assert why in result.reasons[0]
    assert result.reasons[0].isprintable()


def test_a_trace_that_does_not_end(tmp_path: Path) -> None:
    folder = write(tmp_path, TRACED)
    with (folder / STEPS).open("a") as file:
        file.write('{"step"')
    describe(folder)
    with pytest.raises(DamagedCapture, match="it does not end"):
        _ = Capture(folder).steps


def test_steps_that_are_counted_but_not_there(tmp_path: Path) -> None:
    folder = write(tmp_path, TRACED)
    edit(folder, "manifest.json", lambda manifest: manifest["counts"].update(traced_steps=5))
    assert "it holds the schedule of 4 steps instead of 5" in verify(folder).reasons[0]
