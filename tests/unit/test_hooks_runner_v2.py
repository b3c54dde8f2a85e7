"""Model Runner V2 and its speculator are followed, and what full graphs leave is recorded.

vLLM's runner is doubled, method by method as `runner_v2` and `drafts_v2` say they are called: there is no
Triton here. That the real one does so is shown on a GPU.
"""

from __future__ import annotations

from contextlib import ExitStack
from enum import Enum
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from notes import Notes

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.forward_context")

from localizer.hooks import steps, taps, trace  # noqa: E402 - needs torch
from localizer.hooks.ingraph import Graphs  # noqa: E402
from localizer.hooks.recorder import Recorder  # noqa: E402
from localizer.wire.ranks import Naming  # noqa: E402
from localizer.wire.spec import DRAFT, HIDDEN, LOGITS  # noqa: E402

WIDTH, VOCABULARY, MOST = 2, 4, 8
Mode = Enum("Mode", ["NONE", "FULL"])
NONE, FULL = Mode.NONE, Mode.FULL


class Impl:
    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any
    ) -> Any:
        return output.copy_(query + key)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.impl = Impl()

    def forward(self, hidden: Any) -> Any:
        output = torch.empty_like(hidden)
        self.impl.forward(self, hidden, hidden + 1, hidden + 2, None, None, output)
        return output


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Attention()

    def forward(self, input_ids: Any, positions: Any) -> Any:
        return self.layer((input_ids[:, None] + torch.zeros(WIDTH)).float())

    def compute_logits(self, hidden_states: Any) -> Any:
        return hidden_states.repeat(1, VOCABULARY // WIDTH)


class Manager:
    """Replays are doubled: a captured graph runs its function again, with the observer's eyes shut."""

    def __init__(self, sizes: list[int], shut: Any) -> None:
        self._capture_descs = {FULL: [SimpleNamespace(num_tokens=size) for size in sizes]}
        self.graphs: dict[int, Any] = {}
        self._shut = shut

    def capture(self, capturing: Any, run: Any) -> None:
        for desc in self._capture_descs[FULL]:
            capturing(True)
            run(desc.num_tokens)
            capturing(False)
            self.graphs[desc.num_tokens] = run

    def run_fullgraph(self, desc: Any) -> Any:
        return self._shut(lambda: self.graphs[desc.num_tokens](desc.num_tokens))


class Speculator:
    """Two draft steps."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.model = runner, Model()
        self.input_buffers = SimpleNamespace(
            input_ids=torch.zeros(MOST, dtype=torch.int32), positions=torch.zeros(MOST, dtype=torch.int64)
        )
        self.draft_tokens = torch.zeros(MOST, 2, dtype=torch.int64)
        self.prefill_cudagraph_manager: Any = None
        self.decode_cudagraph_manager: Any = None
        self.step, self.last = 0, torch.zeros(0, dtype=torch.int64)

    def init_cudagraph_manager(self, mode: Any) -> None:
        self.prefill_cudagraph_manager = Manager([MOST, 4], self.runner.shut)
        self.decode_cudagraph_manager = Manager([MOST, 2], self.runner.shut)

    def _run(self, rows: int, last: Any) -> None:
        buffers = self.input_buffers
        hidden = self.model(buffers.input_ids[:rows], buffers.positions[:rows])
        logits = self.model.compute_logits(hidden[last])
        self.draft_tokens[: len(last), self.step] = 10 + self.step
        assert logits.shape[1] == VOCABULARY

    def _prefill(self, num_reqs: int, num_tokens: int, *args: Any) -> None:
        self._run(num_tokens, self.last[:num_reqs] if len(self.last) else torch.arange(num_reqs))

    def _generate_draft(self, num_reqs: int, num_tokens_padded: int, *args: Any) -> None:
        self._run(num_tokens_padded, torch.arange(num_reqs))

    def propose(self, input_batch: Any, full: bool = False, dummy_run: bool = False) -> Any:
        rows, requests = len(input_batch.input_ids), input_batch.num_reqs
        self.input_buffers.input_ids[:rows] = input_batch.input_ids + 1
        self.input_buffers.positions[:rows] = input_batch.positions
        self.last = torch.tensor(input_batch.num_scheduled_tokens).cumsum(0) - 1
        for self.step in range(2):
            manager = self.decode_cudagraph_manager if self.step else self.prefill_cudagraph_manager
            padded = 2 if self.step else 4
            if full:
                manager.run_fullgraph(SimpleNamespace(num_tokens=padded))
            elif self.step:
                self._generate_draft(requests, padded)
            else:
                self._prefill(requests, rows)
        return self.draft_tokens[:requests]


class Output:
    """What async scheduling returns: the tokens are waited for by `get_output`."""

    def __init__(self, requests: list[str]) -> None:
        self.sampled_token_ids = "numpy that has not arrived"
        self._requests = requests

    def get_output(self) -> Any:
        return SimpleNamespace(req_ids=self._requests, sampled_token_ids=[[1] for _ in self._requests])


class Runner:
    __module__ = "vllm.v1.worker.gpu.model_runner"
    __qualname__ = "GPUModelRunner"

    def __init__(self) -> None:
        self.model, self.max_num_reqs = Model(), MOST
        self.state = SimpleNamespace(capturing=False, shut=False)
        self.speculator = Speculator(self)
        self.model_state = SimpleNamespace(
            prepare_attn=lambda batch, mode, block_tables, slots: {"layer": SimpleNamespace(x=1)}
        )
        self.block_tables = SimpleNamespace(block_sizes=[1])
        self.tables = torch.tensor([[3, 4, 0], [7, 0, 0], [0, 0, 0]], dtype=torch.int32)
        self.cudagraph_manager: Any = None
        self.execute_model_state: Any = None
        self.ids, self.places = torch.zeros(MOST, dtype=torch.int32), torch.zeros(MOST, dtype=torch.int64)

    def shut(self, run: Any) -> Any:
        """Do as a replay does: what is computed changes, and no Python of a tap runs but the copies."""
        self.state.shut = True
        try:
            return run()
        finally:
            self.state.shut = False

    def initialize_kv_cache(self) -> None:
        self.cudagraph_manager = Manager([MOST, 4], self.shut)
        self.speculator.init_cudagraph_manager(FULL)

    def forward(self, rows: int) -> Any:
        return self.model(self.ids[:rows], self.places[:rows])

    def capture_model(self) -> int:
        def capturing(on: bool) -> None:
            self.state.capturing = on

        self.cudagraph_manager.capture(capturing, self.forward)
        draft = self.speculator
        draft.prefill_cudagraph_manager.capture(capturing, lambda rows: draft._prefill(min(rows, 2), rows))
        draft.step = 1
        draft.decode_cudagraph_manager.capture(
            capturing, lambda rows: draft._generate_draft(min(rows, 2), rows)
        )
        return 0

    def prepare_inputs(self, scheduler_output: Any, batch_desc: Any) -> Any:
        counts = scheduler_output.num_scheduled_tokens
        self.ids[:4], self.places[:4] = torch.tensor([5, 6, 7, 0]), torch.tensor([0, 1, 0, 0])
        return SimpleNamespace(
            req_ids=list(counts), num_reqs=len(counts), num_scheduled_tokens=list(counts.values()),
            input_ids=self.ids[:4], positions=self.places[:4],
        )  # fmt: skip

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False,
        mode: Any = NONE,
    ) -> None:  # fmt: skip
        if dummy_run:
            self.forward(4)
            return
        if not scheduler_output.total_num_scheduled_tokens:
            self.execute_model_state = None
            return
        desc = SimpleNamespace(cg_mode=mode, num_tokens=4)
        batch = self.prepare_inputs(scheduler_output, desc)
        self.model_state.prepare_attn(batch, mode, (self.tables,), slots=None)
        hidden = self.cudagraph_manager.run_fullgraph(desc) if mode is FULL else self.forward(4)
        self.execute_model_state = SimpleNamespace(
            batch=batch, hidden=hidden, aux_hidden_states=None, full=mode is FULL
        )

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        last = torch.tensor(input_batch.num_scheduled_tokens).cumsum(0) - 1
        return self.model.compute_logits(hidden_states[last])

    def sample_tokens(self, grammar_output: Any = None) -> Any:
        state, self.execute_model_state = self.execute_model_state, None
        if state is None:
            return None
        self.sample(state.hidden, state.batch, None)
        self.speculator.propose(state.batch, state.full)
        return Output(state.batch.req_ids)


def scheduled(**counts: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={},
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0) for name in counts],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set()),
        finished_req_ids=set(),
    )


class Setting:
    """A runner that is followed, from loading to the first round."""

    def __init__(self) -> None:
        self.runner, self.notes, self.undo = Runner(), Notes(), ExitStack()
        self.recorder = recorder = Recorder(self.notes)
        state = self.runner.state
        self.log: list[str] = []
        self.graphs = Graphs(
            torch.device("cpu"), lambda: state.capturing or state.shut, recorder.knows, self.log.append,
            lambda: 1 << 20, recorder.stack,
        )  # fmt: skip
        layers = {"layer": self.runner.model.layer, "draft.layer": self.runner.speculator.model.layer}
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
        self.undo.enter_context(taps.install(recorder, self.runner, config, "all", graphs=self.graphs))
        shut_eyes(self.runner, recorder)
        tracer = trace.Tracer(recorder, self.notes, self.runner, ["layer"])
        steps.follow(steps.Steps(recorder, tracer), self.undo, self.runner, self.graphs)

    def start(self) -> None:
        runner = self.runner
        runner.execute_model(scheduled(p=4), dummy_run=True)  # profiling
        runner.speculator.propose(runner.prepare_inputs(scheduled(p=4), None), dummy_run=True)
        runner.initialize_kv_cache()
        runner.capture_model()
        runner.execute_model(scheduled(w=3))  # warmup_kernels
        runner.sample_tokens()
        self.recorder.round({"a": "r00.00", "b": "r00.01"})

    def step(self, mode: Any = NONE) -> Any:
        self.runner.execute_model(scheduled(a=2, b=1), mode=mode)
        return self.runner.sample_tokens()


def shut_eyes(runner: Runner, recorder: Recorder) -> None:
    """During a doubled replay the taps take the way that they take while a graph is captured."""
    original = type(recorder).recording.fget
    assert original is not None

    class Blinking(Recorder):
        @property
        def recording(self) -> bool:
            return not runner.state.shut and original(self)

    recorder.__class__ = Blinking


@pytest.fixture
def setting() -> Setting:
    setting = Setting()
    setting.start()
    assert setting.recorder.errors == []
    return setting


def test_nothing_is_recorded_before_the_first_round(setting: Setting) -> None:
    assert setting.notes.taken == []
    assert [message["type"] for message in setting.notes.messages] == ["sites", "round"]
    assert setting.recorder.dummies == 2


def test_a_step(setting: Setting) -> None:
    output = setting.step()
    end = setting.notes.messages[-1]
    later = end["sampled"]
    assert output.get_output().sampled_token_ids == [[1], [1]]
    assert later.get(0) == {"a": [1], "b": [1]}
    assert end["proposed"] == {"a": [10, 11], "b": [10, 11]}
    kinds = [message["type"] for message in setting.notes.messages]
    assert kinds == ["sites", "round", "step", "trace", "draft", "draft", "end"]
    step, told, first, second = setting.notes.messages[2:6]
    assert (step["tokens"], step["positions"], step["counts"]) == ([5, 6, 7], [0, 1, 0], [2, 1])
    assert (told["graph"], told["padded"], told["backend"]) == ("NONE", 4, {"x": 1})
    digests = [blake2b(np.array(blocks, np.int32).tobytes(), digest_size=16) for blocks in ([3, 4], [7])]
    assert told["blocks"] == [digest.hexdigest() for digest in digests]
    assert (first["counts"], first["tokens"], first["extra"]) == ([2, 1], [6, 7, 8], 0)
    assert second["counts"] == [1, 1]
    assert setting.recorder.counts() == {"rows_at_host": 3, "rows_in_graph": 0}


def test_a_replayed_step_records_the_same(setting: Setting) -> None:
    setting.step()
    at_host = list(setting.notes.taken)
    setting.notes.taken.clear()
    setting.step(FULL)
    assert setting.recorder.errors == []
    assert setting.recorder.counts() == {"rows_at_host": 3, "rows_in_graph": 3}
    assert setting.recorder.replays == {"target": 1, "draft": 2}
    names = [name for name, _ in at_host]
    assert {"layer/query", "layer/output", HIDDEN, LOGITS} < set(names)
    assert {DRAFT + "draft.layer/query", DRAFT + HIDDEN, DRAFT + LOGITS} < set(names)
    assert [name for name, _ in setting.notes.taken] == names
    for (name, there), (_, here) in zip(at_host, setting.notes.taken, strict=True):
        assert torch.equal(there, here), name
    traces = [message["graph"] for message in setting.notes.messages if message["type"] == "trace"]
    assert traces == ["NONE", "FULL"]


def test_a_step_without_tokens(setting: Setting) -> None:
    setting.runner.execute_model(scheduled())
    assert setting.runner.sample_tokens() is None
    assert not setting.recorder.in_forward
    setting.step()
    assert setting.recorder.errors == []


def test_a_fault_of_the_run_is_its_own(setting: Setting) -> None:
    setting.runner.model.layer.impl.forward = lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        setting.step()
    assert not setting.recorder.in_forward


def test_tokens_that_cannot_be_read_are_told_to_who_waits(setting: Setting) -> None:
    output = setting.step()
    output._requests = None
    with pytest.raises(TypeError):
        output.get_output()
    with pytest.raises(RuntimeError, match="vLLM failed"):
        setting.notes.messages[-1]["sampled"].get(0)


def test_tokens_that_vllm_never_asks_for_are_collected_at_the_end(setting: Setting) -> None:
    """Under async scheduling a step may be run ahead for requests that turn out to be finished."""
    output = setting.step()
    setting.recorder.finish()
    assert setting.notes.messages[-1]["sampled"].get(0) == {"a": [1], "b": [1]}
    output._requests = None  # vLLM's own can be asked only once
    assert output.get_output().req_ids == ["a", "b"]


def test_tokens_of_a_rank_that_vllm_does_not_ask(setting: Setting) -> None:
    """Of several workers vLLM asks rank 0 alone: on the others whoever needs the tokens does."""
    setting.recorder.naming = Naming(1, 2)
    output = setting.step()
    assert setting.notes.messages[-1]["sampled"].get(0) == {"a": [1], "b": [1]}
    assert output.get_output().req_ids == ["a", "b"]


def test_everything_can_be_taken_away(setting: Setting) -> None:
    setting.undo.close()
    runner = setting.runner
    assert not {"execute_model", "sample", "sample_tokens", "prepare_inputs", "capture_model"} & set(
        vars(runner)
    )
    assert not {"propose", "_prefill", "_generate_draft"} & set(vars(runner.speculator))
    assert "run_fullgraph" not in vars(runner.cudagraph_manager)


def test_a_speculator_of_another_kind_is_named() -> None:
    runner = Runner()
    runner.speculator = SimpleNamespace(model=Model(), propose=lambda: None)  # type: ignore[assignment]
    notes = Notes()
    layers = {"layer": runner.model.layer, "draft.layer": runner.speculator.model.layer}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    taps.install(Recorder(notes), runner, config, "all")
    assert notes.messages[0]["untapped"] == {
        DRAFT + "draft.layer": "SimpleNamespace, whose draft steps no adapter knows"
    }
    assert not any(name.startswith(DRAFT) for name in notes.names)
