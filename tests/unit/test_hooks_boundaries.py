"""The registry of boundaries knows a layer by what its ops take; another layout is unknown, never guessed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from notes import Notes

torch = pytest.importorskip("torch")

from localizer.hooks import steps, taps  # noqa: E402 - needs torch
from localizer.hooks.boundaries import CHOOSES_ITSELF, COMPILED, block, boundaries  # noqa: E402
from localizer.hooks.recorder import Recorder  # noqa: E402
from localizer.wire.spec import CHOICE_KINDS, EXPERT_KINDS  # noqa: E402

Module = torch.nn.Module
ROWS = torch.arange(6.0).reshape(3, 2)


class Attention(Module):
    def __init__(self) -> None:
        super().__init__()
        self.impl = SimpleNamespace(forward=self.compute)

    def compute(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any
    ) -> None:
        output.copy_(query + key + value)


class Latent(Module):
    use_direct_call = False

    def forward_impl(
        self, q: Any, k_c_normed: Any, k_pe: Any, kv_cache: Any, attn_metadata: Any, output: Any
    ) -> Any:
        output.copy_(q + k_c_normed)
        return output


class StateSpace(Module):
    def conv_ssm_forward(self, projected_states: Any, output: Any) -> None:
        output.copy_(projected_states * 2)


class Router:
    def select_experts(self, hidden_states: Any, router_logits: Any) -> Any:
        return router_logits.softmax(-1), router_logits.argsort(-1)


class Experts(Module):
    def __init__(self, shared: bool = False, monolithic: bool = False) -> None:
        super().__init__()
        self.router = Router()
        self._shared_experts = Module() if shared else None
        self._quant_method = SimpleNamespace(is_monolithic=monolithic)

    def _forward_impl(self, hidden_states: Any, router_logits: Any, shared_experts_input: Any) -> Any:
        self.router.select_experts(hidden_states=hidden_states, router_logits=router_logits + 1)
        result = hidden_states * 3
        return (hidden_states * 5, result) if self._shared_experts is not None else result


class Unknown(Module):
    """Its op takes something that no version seen takes."""

    def forward_impl(self, states: Any, output: Any) -> None: ...


def found(layer: Any, mode: int = 0) -> tuple[list[Any], dict[str, str]]:
    model = Module()
    model.layer = layer
    context = {"model.layers.0.op": layer, "model.layers.0.other": Attention()}  # of another model
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context, mode=mode))
    return boundaries(config, model)


@pytest.mark.parametrize(
    ("layer", "parts", "mixes"),
    [
        (Attention(), ("query", "key", "value", "output"), True),
        (Latent(), ("query", "latent", "key_rope", "output"), True),
        (StateSpace(), ("projected_states", "output"), True),
        (Experts(), tuple(part for part in EXPERT_KINDS if part != "shared_output"), False),
        (Experts(shared=True), EXPERT_KINDS, False),
        (Experts(monolithic=True), ("hidden_states", "output"), False),
    ],
)
def test_each_kind_of_layer_is_known(layer: Any, parts: tuple[str, ...], mixes: bool) -> None:
    known, unknown = found(layer)
    assert [(item.name, item.parts, item.mixes) for item in known] == [("model.layers.0.op", parts, mixes)]
    assert unknown == {}


def test_a_layer_of_another_layout_is_unknown() -> None:
    assert found(Unknown()) == ([], {"model.layers.0.op": "Unknown"})


def test_experts_in_compiled_code_are_named() -> None:
    (experts,), unknown = found(Experts(), mode=3)
    assert (experts.ops, experts.parts, unknown) == ((), (), {})
    assert experts.absent == dict.fromkeys(EXPERT_KINDS, COMPILED)


def test_a_choice_inside_the_kernel_is_named() -> None:
    (experts,), _ = found(Experts(monolithic=True))
    assert experts.absent == dict.fromkeys(CHOICE_KINDS, CHOOSES_ITSELF)


def test_latent_attention_that_is_traced_is_unknown() -> None:
    layer = Latent()
    layer.use_direct_call = True
    assert found(layer)[1] == {}
    assert found(layer, mode=3) == ([], {"model.layers.0.op": "Latent"})


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("model.layers.3.self_attn.attn", "model.layers.3"),
        ("language_model.model.layers.12", "language_model.model.layers.12"),
        ("transformer.h.0.mlp.experts.1", "transformer.h.0"),
        ("model.norm", ""),
        ("", ""),
    ],
)
def test_the_decoder_layer_of_a_name(name: str, home: str) -> None:
    assert block(name) == home


class Model(Module):
    """Runs what the test hands it once the inputs are there."""

    def __init__(self, layer: Any, call: Any) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, input_ids: Any, positions: Any) -> Any:
        return self.call()

    def compute_logits(self, hidden_states: Any) -> Any:
        return hidden_states


def recorded(layer: Any, call: Any) -> dict[str, Any]:
    """What the taps on a layer record while `call` runs inside a step of two of three rows."""
    notes = Notes()
    recorder = Recorder(notes)  # type: ignore[arg-type]
    model = Model(layer, call)
    runner = SimpleNamespace(
        model=model,
        input_batch=SimpleNamespace(req_ids=["a"]),
        execute_model=lambda output: model(torch.tensor([1, 2, 0]), torch.tensor([0, 1, 0])),
        sample_tokens=lambda: None,
    )
    context = {"model.layers.0.op": layer}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context, mode=0))
    undo = taps.install(recorder, runner, config, "all", ("*.op/*",))
    steps.follow(steps.Steps(recorder), undo, runner)
    runner.execute_model(
        SimpleNamespace(
            num_scheduled_tokens={"a": 2}, total_num_scheduled_tokens=2, scheduled_spec_decode_tokens={}
        )
    )
    assert recorder.errors == []
    return {site.rpartition("/")[2]: rows for site, rows in notes.taken}


def test_what_experts_take_choose_and_give_is_recorded() -> None:
    layer = Experts(shared=True)
    rows = recorded(layer, lambda: layer._forward_impl(ROWS, ROWS, None))
    assert list(rows) == [
        "hidden_states", "router_logits", "expert_weights", "expert_ids", "shared_output", "output",
    ]  # fmt: skip
    assert torch.equal(rows["hidden_states"], ROWS[:2])
    assert torch.equal(rows["router_logits"], ROWS[:2] + 1)  # as the router was given them
    assert torch.equal(rows["expert_ids"], (ROWS[:2] + 1).argsort(-1))
    assert torch.equal(rows["shared_output"], ROWS[:2] * 5)
    assert torch.equal(rows["output"], ROWS[:2] * 3)


def test_experts_without_shared_ones_give_one_output() -> None:
    layer = Experts()
    rows = recorded(layer, lambda: layer._forward_impl(ROWS, router_logits=ROWS, shared_experts_input=None))
    assert "shared_output" not in rows
    assert torch.equal(rows["output"], ROWS[:2] * 3)


@pytest.mark.parametrize("named", [False, True])
def test_buffers_that_an_op_fills_are_recorded_when_it_is_done(named: bool) -> None:
    layer, output = StateSpace(), torch.zeros(3, 2)
    arguments = {"projected_states": ROWS, "output": output}
    positional = () if named else tuple(arguments.values())
    rows = recorded(layer, lambda: layer.conv_ssm_forward(*positional, **(arguments if named else {})))
    assert torch.equal(rows["projected_states"], ROWS[:2])
    assert torch.equal(rows["output"], ROWS[:2] * 2)


def test_latent_attention_is_recorded() -> None:
    layer, output = Latent(), torch.zeros(3, 2)
    rows = recorded(layer, lambda: layer.forward_impl(ROWS, ROWS + 1, ROWS + 2, None, None, output=output))
    assert [rows[part][0, 0].item() for part in ("query", "latent", "key_rope", "output")] == [0, 1, 2, 1]
