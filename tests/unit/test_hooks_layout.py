"""What the adapters take for granted is checked up front.

vLLM is doubled throughout: modules and classes with just the attributes that the check looks at. That the
real ones pass is shown by every integration test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from localizer.hooks import layout
from localizer.hooks.layout import UnknownLayout
from localizer.wire.versions import SEEN


class DoubledImpl:
    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
        output: Any, output_scale: Any = None,
    ) -> None: ...  # fmt: skip


class DoubledModel:
    """Has one attention layer."""

    def __init__(self) -> None:
        self.attention = SimpleNamespace(impl=DoubledImpl())
        self.aux_hidden_state_layers = (2, 4, 5)

    def modules(self) -> list[Any]:
        return [self, self.attention]

    def register_forward_pre_hook(self, hook: Any) -> None: ...

    def forward(self, input_ids: Any, positions: Any, intermediate_tensors: Any = None) -> None: ...

    def compute_logits(self, hidden_states: Any) -> None: ...


class DoubledDrafter:
    def __init__(self) -> None:
        self.model = DoubledModel()

    def propose(self, *args: Any) -> None: ...


class DoubledRunner:
    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=[])
        self.model = DoubledModel()
        self.drafter = DoubledDrafter()
        self.use_aux_hidden_state_outputs = True

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None: ...

    def sample_tokens(self, grammar_output: Any) -> None: ...


class DoubledWorker:
    def __init__(self) -> None:
        self.model_runner = DoubledRunner()
        layers = {
            "model.layers.0.attn": self.model_runner.model.attention,
            "model.layers.1.attn": self.model_runner.drafter.model.attention,
            "model.layers.0.experts": object(),
        }
        self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))

    def load_model(self) -> None: ...


class DoubledLLM:
    def sleep(self, level: int = 1, mode: str = "abort") -> None: ...

    def enqueue(self, prompts: Any, sampling_params: Any = None, use_tqdm: bool = True) -> None: ...

    def wake_up(self, tags: Any = None) -> None: ...

    def wait_for_completion(self, **kwargs: Any) -> None: ...

    def collective_rpc(self, method: str, timeout: Any = None, args: Any = ()) -> None: ...


@dataclass
class DoubledForwardContext:
    attn_metadata: Any
    slot_mapping: Any = field(default_factory=dict)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """A doubled vLLM 9.8.7, module by module."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "9.8.7"},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.output": {
            "SchedulerOutput": make_dataclass("SchedulerOutput", list(layout.SCHEDULED))
        },
        "vllm.v1.outputs": {"ModelRunnerOutput": make_dataclass("ModelRunnerOutput", list(layout.SAMPLED))},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_worker": {"Worker": DoubledWorker},
        "vllm.forward_context": {
            "ForwardContext": DoubledForwardContext,
            "get_forward_context": lambda: None,
        },
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": object},
        "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu")},
    }
    modules = {}
    for name, attributes in contents.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(attributes)
        modules[name].__path__ = []
        monkeypatch.setitem(sys.modules, name, modules[name])
    return modules


def test_a_known_arrangement_passes() -> None:
    layout.check(DoubledWorker())
    layout.check_admission(DoubledLLM())
    assert layout.worker_class() is DoubledWorker


def without(name: str, kind: type) -> Callable[[Any], None]:
    """A change that takes a method away from the class of an object."""
    bare = type(kind.__name__, (), {key: value for key, value in vars(kind).items() if key != name})
    return lambda thing: setattr(thing, "__class__", bare)


def attribute(name: str) -> Callable[[Any], None]:
    """A change that takes an attribute away."""
    return lambda thing: delattr(thing, name)


def taking(name: str, function: Callable[..., None]) -> Callable[[Any], None]:
    """A change of what a method takes."""
    return lambda thing: setattr(thing, name, function)


CHANGES: list[tuple[str, Callable[[Any], None], str]] = [
    ("", attribute("model_runner"), "DoubledWorker has no model_runner"),
    ("", attribute("vllm_config"), "DoubledWorker has no vllm_config"),
    ("model_runner", attribute("input_batch"), "the model runner .*DoubledRunner has no adapter"),
    (
        "model_runner",
        without("sample_tokens", DoubledRunner),
        "the model runner .*DoubledRunner has no adapter",
    ),
    ("model_runner", without("execute_model", DoubledRunner), "DoubledRunner has no execute_model"),
    (
        "model_runner",
        taking("execute_model", lambda plan: None),
        "DoubledRunner.execute_model takes plan, not scheduler_output",
    ),
    ("model_runner", attribute("model"), "DoubledRunner has no model"),
    ("model_runner.input_batch", attribute("req_ids"), "DoubledRunner.input_batch has no req_ids"),
    (
        "model_runner.model",
        attribute("aux_hidden_state_layers"),
        "DoubledModel has no aux_hidden_state_layers",
    ),
    ("model_runner.model", without("compute_logits", DoubledModel), "DoubledModel has no compute_logits"),
    (
        "model_runner.model",
        taking("compute_logits", lambda rows, metadata: None),
        "DoubledModel.compute_logits takes rows, metadata, not hidden_states",
    ),
    (
        "model_runner.model",
        taking("forward", lambda: None),
        "DoubledModel.forward takes nothing, not input_ids",
    ),
    (
        "model_runner.model",
        without("register_forward_pre_hook", DoubledModel),
        "DoubledModel takes no forward hooks",
    ),
    (
        "model_runner.model.attention.impl",
        taking("forward", lambda layer, query, key, value, cache: None),
        "DoubledImpl.forward of model.layers.0.attn takes layer, query, key, value, cache",
    ),
    (
        "model_runner.model.attention.impl",
        taking("forward", lambda *args, **kwargs: None),
        r"DoubledImpl.forward of model.layers.0.attn takes \*args, \*\*kwargs",
    ),
    ("model_runner.drafter", without("propose", DoubledDrafter), "DoubledDrafter has no propose"),
    (
        "model_runner.drafter.model",
        without("compute_logits", DoubledModel),
        "DoubledModel has no compute_logits",
    ),
    (
        "vllm_config.compilation_config",
        attribute("static_forward_context"),
        "compilation_config has no table static_forward_context",
    ),
]


@pytest.mark.parametrize(("place", "change", "sentence"), CHANGES, ids=[change[2][:60] for change in CHANGES])
def test_what_is_arranged_otherwise_is_named(
    place: str, change: Callable[[Any], None], sentence: str
) -> None:
    worker = DoubledWorker()
    target: Any = worker
    for name in filter(None, place.split(".")):
        target = getattr(target, name)
    change(target)
    with pytest.raises(UnknownLayout, match=f"vLLM 9.8.7: {sentence}") as raised:
        layout.check(worker)
    assert str(raised.value).endswith(
        f"a layout this localizer does not know (it was seen on {', '.join(SEEN['v1', 'cpu'])})"
    )


@pytest.mark.parametrize(
    ("module", "name", "value", "sentence"),
    [
        ("vllm.v1.core.sched.output", "SchedulerOutput", None, "there is no vllm.v1.core.sched.output.Sch"),
        ("vllm.v1.core.sched.output", "SchedulerOutput", make_dataclass("SchedulerOutput", ["x"]),
         "SchedulerOutput has no num_scheduled_tokens"),
        ("vllm.v1.outputs", "ModelRunnerOutput", make_dataclass("ModelRunnerOutput", ["req_ids"]),
         "ModelRunnerOutput has no sampled_token_ids"),
        ("vllm.forward_context", "get_forward_context", None, "there is no vllm.forward_context.get_for"),
        ("vllm.forward_context", "ForwardContext", make_dataclass("ForwardContext", []),
         "ForwardContext has no attn_metadata"),
    ],
)  # fmt: skip
def test_records_of_a_step(
    vllm: dict[str, ModuleType], module: str, name: str, value: Any, sentence: str
) -> None:
    setattr(vllm[module], name, value)
    with pytest.raises(UnknownLayout, match=sentence):
        layout.check(DoubledWorker())


@pytest.mark.parametrize("draft", [None, SimpleNamespace(), SimpleNamespace(model=None)])
def test_a_drafter_without_a_model_needs_nothing(draft: Any) -> None:
    worker = DoubledWorker()
    worker.model_runner.drafter = draft
    layout.check(worker)


def test_a_draft_without_attention_layers_needs_nothing() -> None:
    worker = DoubledWorker()
    worker.model_runner.drafter.model = SimpleNamespace(modules=lambda: [])
    layout.check(worker)


class DoubledRunnerV2:
    __module__ = "vllm.v1.worker.gpu.model_runner"
    __qualname__ = "GPUModelRunner"

    def __init__(self) -> None:
        self.model = DoubledModel()
        self.model_state = SimpleNamespace(prepare_attn=lambda input_batch, cudagraph_mode: {})

    def execute_model(self, scheduler_output: Any, dummy_run: bool = False) -> None: ...

    def sample_tokens(self, grammar_output: Any) -> None: ...

    def prepare_inputs(self, scheduler_output: Any, batch_desc: Any) -> None: ...

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> None: ...

    def capture_model(self) -> None: ...


@pytest.fixture
def worker_v2(vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> DoubledWorker:
    for name in ("vllm.v1.worker.gpu", "vllm.v1.worker.gpu.input_batch"):
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    module.InputBatch = make_dataclass("InputBatch", list(layout.BATCH))  # type: ignore[attr-defined]
    worker = DoubledWorker()
    worker.model_runner = DoubledRunnerV2()  # type: ignore[assignment]
    return worker


def test_model_runner_v2_is_known(worker_v2: DoubledWorker) -> None:
    assert layout.runner_kind(worker_v2.model_runner) == "v2"
    layout.check(worker_v2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (taking("execute_model", lambda scheduler_output: None), "takes scheduler_output, not dummy_run"),
        (taking("prepare_inputs", lambda scheduler_output: None), "prepare_inputs takes .*, not batch_desc"),
        (taking("sample", None), "has no sample"),  # type: ignore[arg-type]
        (taking("capture_model", None), "has no capture_model"),  # type: ignore[arg-type]
        (attribute("model_state"), "has no model_state"),
        (attribute("model"), "has no model"),
        (taking("model_state", SimpleNamespace()), "has no prepare_attn"),  # type: ignore[arg-type]
    ],
)
def test_a_model_runner_v2_of_another_arrangement_is_named(
    worker_v2: DoubledWorker, change: Callable[[Any], None], sentence: str
) -> None:
    change(worker_v2.model_runner)
    with pytest.raises(UnknownLayout, match=sentence):
        layout.check(worker_v2)


def test_a_batch_of_another_arrangement_is_named(worker_v2: DoubledWorker) -> None:
    module: Any = sys.modules["vllm.v1.worker.gpu.input_batch"]
    module.InputBatch = make_dataclass("InputBatch", ["req_ids", "input_ids", "positions"])
    with pytest.raises(UnknownLayout, match=r"InputBatch of .* has no num_scheduled_tokens"):
        layout.check(worker_v2)


def test_a_model_inside_of_a_wrapper_for_graphs_is_looked_at(worker_v2: DoubledWorker) -> None:
    """The V1 runner's replays are followed by `_model_forward`."""
    worker = DoubledWorker()
    worker.model_runner.model = SimpleNamespace(unwrap=DoubledModel)  # type: ignore[assignment]
    with pytest.raises(UnknownLayout, match="DoubledRunner has no _model_forward"):
        layout.check(worker)
    for name in ("_model_forward", "capture_model"):
        setattr(worker.model_runner, name, lambda input_ids, positions: None)
    layout.check(worker)


@pytest.mark.parametrize("name", [*layout.ADMISSION, "collective_rpc"])
def test_admission(name: str) -> None:
    bare = type("LLM", (DoubledLLM,), {name: None})
    with pytest.raises(UnknownLayout, match=f"LLM has no {name}"):
        layout.check_admission(bare)


def test_admission_with_other_parameters() -> None:
    bare = type("LLM", (DoubledLLM,), {"sleep": lambda self, level: None})
    with pytest.raises(UnknownLayout, match=r"LLM\.sleep takes level, not mode"):
        layout.check_admission(bare)


def test_the_worker_class(vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    vllm["vllm.v1.worker.gpu_worker"].Worker = SimpleNamespace()  # type: ignore[attr-defined]
    with pytest.raises(UnknownLayout, match="Worker has no load_model"):
        layout.worker_class()
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", None)
    with pytest.raises(UnknownLayout, match=r"vLLM 9\.8\.7: there is no vllm\.v1\.worker\."):
        layout.worker_class()


def test_what_is_recorded_about_the_adapter(vllm: dict[str, ModuleType]) -> None:
    runner = DoubledRunner()
    for version, seen in (("0.32.0", True), ("0.32.0+cpu", True), ("0.32.1", False), ("0.32.1.dev3", False)):
        assert layout.adapter_facts(runner, version) == {"runner": "v1", "platform": "cpu", "seen": seen}
    vllm["vllm.platforms"].current_platform.device_type = "tpu"
    assert layout.adapter_facts(runner, "0.32.0")["seen"] is False
