"""The tracer tells each recorded step once, from host memory, and its faults stay its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
forward_context = pytest.importorskip("vllm.forward_context")

from localizer.hooks import steps, trace  # noqa: E402 - needs torch
from localizer.hooks.recorder import Recorder  # noqa: E402
from localizer.hooks.tables import HostTables, binder, device_tables  # noqa: E402

LAYERS = ["layers.0", "layers.1"]


class Notes:
    """Stands in for the sink."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def message(self, **content: Any) -> None:
        self.messages.append(content)

    def rows(self, site: int, tensor: Any, count: int) -> None:
        pass

    def later(self, tensor: Any, convert: Any = None) -> Any:
        return tensor.tolist() if convert is None else convert(tensor.tolist())

    def flush(self) -> None:
        pass

    def count(self, **counters: int) -> None:
        pass

    @property
    def traces(self) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == "trace"]


@dataclass
class Part:
    num_splits: int = 4
    tensor: Any = None


@dataclass
class Metadata:
    max_query_len: int = 2
    causal: bool = True
    scale: float = 0.5
    kind: str = "x"
    slot_mapping: Any = field(default_factory=lambda: torch.tensor([256, 257, 130, 0]))
    prefill: Any = field(default_factory=Part)
    decode: Any = None


class Table:
    block_size = 128

    def __init__(self) -> None:
        self.array = np.array([[2, 9, 9], [1, 3, 9]], np.int32)

    def get_numpy_array(self) -> np.ndarray:
        return self.array


class Model(torch.nn.Module):
    def forward(self, input_ids: Any, positions: Any) -> Any:
        return input_ids


class Runner:
    """Two requests of two and one tokens, padded to four rows."""

    def __init__(self, metadata: Any) -> None:
        self.metadata = metadata
        self.model = Model()
        self.input_batch = SimpleNamespace(
            req_ids=["a", "b"], block_table=SimpleNamespace(block_tables=[Table()])
        )
        self.context = SimpleNamespace(
            attn_metadata=metadata,
            cudagraph_runtime_mode=SimpleNamespace(name="PIECEWISE"),
            batch_descriptor=SimpleNamespace(num_tokens=4, num_reqs=None, uniform=False),
        )

    def execute_model(self, output: Any) -> None:
        if output.total_num_scheduled_tokens:
            with forward_context.override_forward_context(self.context):
                self.model(torch.tensor([5, 6, 7, 0]), torch.tensor([0, 1, 0, 0]))

    def sample_tokens(self) -> Any:
        return SimpleNamespace(req_ids=["a", "b"], sampled_token_ids=[[1], [2]])


def output(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "num_scheduled_tokens": {"b": 1, "a": 2},
        "total_num_scheduled_tokens": 3,
        "scheduled_spec_decode_tokens": {"a": [4]},
        "scheduled_new_reqs": [SimpleNamespace(req_id="a", num_computed_tokens=16)],
        "scheduled_cached_reqs": SimpleNamespace(
            req_ids=["b"], num_computed_tokens=[130], resumed_req_ids={"b"}
        ),
        "finished_req_ids": {"c"},
        "preempted_req_ids": None,
    }
    return SimpleNamespace(**(fields | changes))


NOTHING = {"num_scheduled_tokens": {}, "total_num_scheduled_tokens": 0}


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def traced(undo: ExitStack, runner: Any, after: Any = None) -> tuple[Notes, Recorder]:
    notes = Notes()
    recorder = Recorder(notes)  # type: ignore[arg-type]

    tracer = trace.Tracer(recorder, notes, runner, LAYERS)  # type: ignore[arg-type]
    steps.follow(steps.Steps(recorder, tracer, after), undo, runner)
    return notes, recorder


def digest(*numbers: int, dtype: Any = np.int32) -> str:
    return blake2b(np.array(numbers, dtype).tobytes(), digest_size=16).hexdigest()


def test_a_step(undo: ExitStack) -> None:
    runner = Runner({"layers.1": Metadata(kind="y"), "layers.0": Metadata()})
    notes, recorder = traced(undo, runner)
    runner.execute_model(output())
    (told,) = notes.traces
    assert recorder.errors == []
    assert told == {
        **{"type": "trace", "step": 0, "requests": ["a", "b"], "scheduled": [2, 1], "computed": [16, 130]},
        **{"cached": [16, 130], "drafts": [1, 0], "resumed": ["b"], "preempted": [], "finished": ["c"]},
        **{"padded": 4, "graph": "PIECEWISE", "batch": {"num_tokens": 4, "uniform": False}},
        "backend": {
            **{"max_query_len": 2, "causal": True, "scale": 0.5, "kind": "x", "prefill.num_splits": 4}
        },
        "blocks": [digest(2), digest(1, 3)],
        "slots": [digest(256, 257, dtype=np.int64), digest(130, dtype=np.int64)],
    }


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        (Metadata(), "x"),
        ([{"layers.0": Metadata(kind="first")}, {"layers.0": Metadata(kind="second")}], "first"),
        ({"draft.0": Metadata(kind="other")}, "other"),
        ({}, None),
        ([], None),
        (None, None),
    ],
)
def test_layouts_of_metadata(undo: ExitStack, metadata: Any, kind: str | None) -> None:
    runner = Runner(metadata)
    notes, recorder = traced(undo, runner)
    runner.execute_model(output())
    assert recorder.errors == []
    assert notes.traces[0]["backend"].get("kind") == kind
    assert (notes.traces[0]["slots"] is None) == (kind is None)


def test_what_ends_between_steps_is_told_with_the_next_one(undo: ExitStack) -> None:
    runner = Runner(Metadata())
    notes, _ = traced(undo, runner)
    runner.execute_model(output())
    runner.sample_tokens()
    runner.execute_model(output(**NOTHING, finished_req_ids={"d"}, preempted_req_ids={"e"}))
    runner.execute_model(output(finished_req_ids={"f"}))
    assert [told["step"] for told in notes.traces] == [0, 1]
    assert (sorted(notes.traces[1]["finished"]), notes.traces[1]["preempted"]) == (["d", "f"], ["e"])


def test_dummy_forwards_are_not_traced(undo: ExitStack) -> None:
    runner = Runner(Metadata())
    notes, recorder = traced(undo, runner)
    with forward_context.override_forward_context(runner.context):
        runner.model(torch.tensor([1]), torch.tensor([0]))
    assert (notes.traces, recorder.dummies) == ([], 1)


def test_what_comes_after_a_step(undo: ExitStack) -> None:
    seen: list[Any] = []
    runner = Runner(Metadata())
    traced(undo, runner, lambda requests, ends, tables: seen.append((list(requests), dict(ends))))
    runner.execute_model(output())
    runner.execute_model(output(**NOTHING))
    assert seen == [(["a", "b"], {"a": 18, "b": 131})]


def test_a_fault_ends_the_trace_alone(undo: ExitStack) -> None:
    runner = Runner(Metadata())
    notes, recorder = traced(undo, runner)
    runner.execute_model(output(scheduled_cached_reqs=None))
    runner.execute_model(output())
    assert notes.traces == []
    assert recorder.recording
    (error,) = recorder.errors
    assert error.startswith("the schedule trace ended: AttributeError")


def test_everything_can_be_taken_away() -> None:
    runner = Runner(Metadata())
    with ExitStack() as stack:
        traced(stack, runner)
    assert "execute_model" not in vars(runner)


def test_blocks_of_a_device_have_the_digests_of_those_of_the_host() -> None:
    """Two groups of blocks of other sizes; beyond what is in use a table may hold anything."""
    ends, sizes = [33, 5], (16, 4)
    tables = [torch.randint(0, 99, (3, 20), dtype=torch.int32) for _ in sizes]
    host = SimpleNamespace(
        block_tables=[
            SimpleNamespace(get_numpy_array=table.numpy, block_size=size)
            for table, size in zip(tables, sizes, strict=True)
        ]
    )
    runner = SimpleNamespace(block_tables=SimpleNamespace(block_sizes=list(sizes)))
    found = device_tables(runner, tuple(tables), len(ends))
    assert found is not None
    expected = trace.block_digests(host, ends)
    assert trace.device_block_digests(Notes(), found, ends) == expected
    for group, size in enumerate(sizes):
        for row, end in enumerate(ends):
            here = found.blocks(group, row, -(-end // size))
            assert torch.equal(here, HostTables(host.block_tables).blocks(group, row, -(-end // size)))


@pytest.mark.parametrize(
    ("sizes", "tables", "requests"),
    [
        (None, [torch.zeros(2, 2, dtype=torch.int32)], 2),
        ([16], None, 2),
        ([16], [torch.zeros(2, 2, dtype=torch.int64)], 2),
        ([16], [torch.zeros(4, dtype=torch.int32)], 2),
        ([16], [torch.zeros(2, 2, dtype=torch.int32)], 3),
        ([16, 16], [torch.zeros(2, 2, dtype=torch.int32)], 2),
        ([], [], 0),
    ],
)
def test_tables_that_are_arranged_otherwise_are_left_alone(sizes: Any, tables: Any, requests: int) -> None:
    runner = SimpleNamespace(block_tables=SimpleNamespace(block_sizes=sizes))
    assert device_tables(runner, tables, requests) is None
    assert device_tables(SimpleNamespace(), tables, requests) is None


def test_arguments_go_by_name() -> None:
    arguments = binder(lambda batch, mode, block_tables, slots=None: None)
    assert arguments((1, 2, 3), {})["block_tables"] == 3
    assert arguments((1,), {"mode": 2, "block_tables": 4})["block_tables"] == 4
    assert arguments((1,), {"what": 2}) == {}


def test_slots_of_a_device_are_not_waited_for() -> None:
    assert trace.slot_digests(torch.zeros(4, dtype=torch.int64, device="meta"), [2]) is None
    assert trace.block_digests(None, [1]) is None
