"""Taps on a toy model with vLLM's shape record what passes, change nothing, and can be taken away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from notes import Notes

torch = pytest.importorskip("torch")

from localizer.hooks import steps, taps  # noqa: E402 - needs torch
from localizer.hooks.ingraph import Graphs  # noqa: E402
from localizer.hooks.recorder import Recorder  # noqa: E402
from localizer.wire.spec import HIDDEN, INPUT_IDS, LOGITS, POSITIONS  # noqa: E402

WIDTH, VOCABULARY = 4, 8


class Impl:
    """An attention implementation that also spoils its query, as fused kernels do."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
        output: Any, output_scale: Any = None,
    ) -> Any:  # fmt: skip
        output.copy_(query + 2 * key + value)
        query.fill_(-1)
        return output


class Attention(torch.nn.Module):
    def __init__(self, shared: str | None = None) -> None:
        super().__init__()
        self.impl = Impl()
        self.kv_sharing_target_layer_name = shared

    def forward(self, hidden: Any) -> Any:
        output = torch.empty_like(hidden)
        self.impl.forward(self, hidden.clone(), hidden + 1, hidden + 2, None, None, output=output)
        return output


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Attention(), Attention(shared="layers.0")])

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden = (input_ids[:, None] + torch.arange(WIDTH)).float()
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def compute_logits(self, hidden_states: Any) -> Any:
        return hidden_states.repeat(1, VOCABULARY // WIDTH)


class Runner:
    """Two requests of two and one tokens, padded to four rows."""

    def __init__(self) -> None:
        self.model = Model()
        self.input_batch = SimpleNamespace(req_ids=["a", "b"])
        self.logits: Any = None

    def execute_model(self, scheduler_output: Any) -> None:
        hidden = self.model(input_ids=torch.tensor([5, 6, 7, 0]), positions=torch.tensor([0, 1, 0, 0]))
        self.logits = self.model.compute_logits(hidden[[1, 2]])

    def sample_tokens(self) -> Any:
        return SimpleNamespace(req_ids=["a", "b"], sampled_token_ids=[[1], [2]])


STEP = SimpleNamespace(
    num_scheduled_tokens={"a": 2, "b": 1}, total_num_scheduled_tokens=3, scheduled_spec_decode_tokens={}
)


class Reading(Impl):
    """One that leaves its query as it is."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
        output: Any, output_scale: Any = None,
    ) -> Any:  # fmt: skip
        return output.copy_(query + 2 * key + value)


class Spoiling(Impl):
    """One that does not."""


for kind in (Reading, Spoiling):  # what vLLM calls those that only read
    kind.__name__, kind.__module__ = "FlashAttentionImpl", "vllm.v1.attention.backends.flash_attn"


def tapped(runner: Runner, selection: str = "all", graphs: Any = None) -> tuple[Notes, Recorder, Any]:
    notes = Notes()
    recorder = Recorder(notes)  # type: ignore[arg-type]
    context = {f"layers.{index}": layer for index, layer in enumerate(runner.model.layers)}
    context["draft.layers.0"] = Attention()  # another model's layer
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    undo = taps.install(recorder, runner, config, selection, graphs=graphs and graphs(recorder))
    steps.follow(steps.Steps(recorder), undo, runner)
    return notes, recorder, undo


def run(runner: Runner) -> Any:
    runner.execute_model(STEP)
    return runner.sample_tokens()


def test_what_passes_is_recorded() -> None:
    runner = Runner()
    notes, recorder, _ = tapped(runner)
    run(runner)
    assert recorder.errors == []
    assert [site for site, _ in notes.taken] == [
        INPUT_IDS, POSITIONS,
        "layers.0/query", "layers.0/key", "layers.0/value", "layers.0/output",
        "layers.1/query", "layers.1/output",
        HIDDEN, LOGITS,
    ]  # fmt: skip
    table = dict(notes.taken)
    query = (torch.tensor([5, 6, 7])[:, None] + torch.arange(WIDTH)).float()
    assert torch.equal(table["layers.0/query"], query)  # as it came, not as the kernel left it
    assert torch.equal(table["layers.0/key"], query + 1)
    assert torch.equal(table["layers.0/output"], 4 * query + 4)
    assert torch.equal(table["layers.1/query"], table["layers.0/output"])
    assert torch.equal(table[HIDDEN], table["layers.1/output"][[1, 2]])
    assert torch.equal(table[LOGITS], table[HIDDEN].repeat(1, 2))
    assert notes.messages[0]["not_applicable"] == {
        f"layers.1/{kind}": "the layer shares the KV cache of layers.0" for kind in ("key", "value")
    }
    assert [message["type"] for message in notes.messages] == ["sites", "step", "end"]
    assert notes.messages[-1]["sampled"] == {"a": [1], "b": [2]}


def test_nothing_is_changed() -> None:
    plain, observed = Runner(), Runner()
    tapped(observed)
    assert run(plain).sampled_token_ids == run(observed).sampled_token_ids
    assert torch.equal(plain.logits, observed.logits)


def test_forwards_outside_a_step_are_dropped() -> None:
    runner = Runner()
    notes, recorder, _ = tapped(runner)
    runner.model(torch.tensor([1]), torch.tensor([0]))
    runner.model.compute_logits(torch.zeros(1, WIDTH))
    assert (notes.taken, recorder.dummies) == ([], 1)


def test_a_selection_of_layers() -> None:
    runner = Runner()
    notes, _, _ = tapped(runner, "1")
    run(runner)
    assert {site for site, _ in notes.taken if site.startswith("layers")} == {
        "layers.1/query",
        "layers.1/output",
    }


def test_taps_can_be_taken_away() -> None:
    runner = Runner()
    notes, recorder, undo = tapped(runner)
    undo.close()
    run(runner)
    assert (notes.taken, recorder.dummies) == ([], 0)
    assert "forward" not in vars(runner.model.layers[0].impl)
    assert not {"execute_model", "sample_tokens"} & set(vars(runner))
    assert "compute_logits" not in vars(runner.model)


def test_a_fault_of_the_observer_does_not_reach_the_run() -> None:
    runner = Runner()
    notes, recorder, _ = tapped(runner)
    notes.rows = None  # type: ignore[assignment,method-assign]
    assert run(runner).sampled_token_ids == [[1], [2]]
    assert len(recorder.errors) == 1
    assert "stopped recording: TypeError" in recorder.errors[0]


def test_a_fault_of_the_run_is_its_own() -> None:
    runner = Runner()
    _, recorder, _ = tapped(runner)
    runner.model.layers[1].impl.forward = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(runner)
    assert not recorder.in_forward


def test_a_run_without_input_ids_is_not_recorded() -> None:
    runner = Runner()
    _, recorder, _ = tapped(runner)
    for hook in runner.model._forward_pre_hooks.values():
        hook(runner.model, (), {"input_ids": None, "inputs_embeds": torch.zeros(1)})
    assert "without input ids" in recorder.errors[0]


class Captured:
    """Graphs on the CPU: a test says when one is captured, and the copies made then stand for its replay."""

    def __init__(self, impl: type[Impl]) -> None:
        self.runner, self.now = Runner(), False
        for layer in self.runner.model.layers:
            layer.impl = impl()
        self.notes, self.recorder, _ = tapped(self.runner, graphs=self.graphs)

    def graphs(self, recorder: Recorder) -> Graphs:
        self.found = Graphs(
            torch.device("cpu"), lambda: self.now, recorder.knows, print, lambda: 1 << 20, recorder.stack
        )
        return self.found

    def warm_up_and_capture(self) -> None:
        inputs = torch.tensor([5, 6, 7, 0]), torch.tensor([0, 1, 0, 0])
        self.runner.model(*inputs)
        self.found.prepare({"target": [4]}, 4)
        self.now = True
        self.runner.model(*inputs)
        self.now = False


@pytest.mark.parametrize("impl", [Impl, Reading])
def test_graphs_serve_what_taps_on_the_host_record(impl: type[Impl], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where inputs are only read, they are copied with the output, by one call."""
    copies: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *both: (copies.append(1), copy(*both)))
    captured = Captured(impl)
    captured.warm_up_and_capture()
    assert len(copies) == 2 * (1 if impl is Reading else 2)
    run(captured.runner)
    at_host = {site: rows for site, rows in captured.notes.taken if "layers" in site}
    captured.notes.taken.clear()
    assert captured.found.target.serve(4, 2)
    in_graph = dict(captured.notes.taken)
    assert set(in_graph) == set(at_host)
    assert len(at_host) == 6
    assert all(torch.equal(rows, in_graph[site]) for site, rows in at_host.items())
    captured.recorder.finish()
    assert captured.recorder.errors == []


@pytest.mark.parametrize("when", ["in a step", "in the warm-up of a graph"])
def test_an_op_that_writes_to_inputs_it_should_only_read_is_found_out(when: str) -> None:
    captured = Captured(Spoiling)
    captured.warm_up_and_capture()
    if when == "in a step":
        for _ in range(2):
            run(captured.runner)
    else:
        captured.runner.model(torch.tensor([5, 6, 7, 0]), torch.tensor([0, 1, 0, 0]))
    captured.recorder.finish()
    assert captured.recorder.errors == [
        f"layers.{number} writes to its own inputs, so that rows from full graphs hold what it left of them"
        for number in (0, 1)
    ]
