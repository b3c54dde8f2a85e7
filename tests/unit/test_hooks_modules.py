"""Taps on the modules of a toy decoder with vLLM's habits: shared modules, residual pairs, modules in ops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from notes import Notes

torch = pytest.importorskip("torch")

from localizer.hooks import layout, steps, taps  # noqa: E402 - needs torch
from localizer.hooks.modules import INLINE, INSIDE_OP, NO_ROWS, NOT_CALLED  # noqa: E402
from localizer.hooks.recorder import Recorder  # noqa: E402
from localizer.wire.spec import BOUNDARY, MODULE  # noqa: E402

WIDTH, VOCABULARY = 6, 12
Module = torch.nn.Module


class Norm(Module):
    """A norm that adds to the residual, in place, as vLLM's fused kernels do."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        if residual is None:
            return x * 0.5
        residual += x
        x.copy_(residual * 0.5)
        return x, residual


class Rotary(Module):
    def forward_native(self, positions: Any, query: Any, key: Any) -> Any:
        return query + positions[:, None], key + positions[:, None]

    def forward(self, *args: Any) -> Any:
        return self.forward_native(*args)


class Linear(Module):
    def forward(self, x: Any) -> Any:
        return x + 1, None


class Attention(Module):
    """An attention layer that calls a module inside its op, on rows of its own choice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear()
        self.impl = SimpleNamespace(forward=self.compute)

    def compute(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any
    ) -> None:
        self.inner(query[:1])
        self.inner(query)
        output.copy_(query + key + value)

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        output = torch.empty_like(query)
        self.impl.forward(self, query, key, value, None, None, output=output)
        return output


class SelfAttention(Module):
    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.qkv_proj, self.rotary_emb, self.attn, self.o_proj = Linear(), rotary, Attention(), Linear()

    def forward(self, positions: Any, hidden: Any) -> Any:
        qkv, _ = self.qkv_proj(hidden)
        query, key = self.rotary_emb(positions, qkv.clone(), qkv.clone())
        return self.o_proj(self.attn(query, key, qkv))[0]


class Layer(Module):
    """A decoder layer; a plain one adds to the stream itself and returns one tensor."""

    def __init__(self, rotary: Any, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain
        self.input_norm, self.self_attn, self.post_norm, self.mlp = (
            Norm(), SelfAttention(rotary), Norm(), Linear(),
        )  # fmt: skip
        self.unused = Linear()
        self.pooler = Pooler()

    def forward(self, positions: Any, hidden: Any, residual: Any) -> Any:
        if self.plain:
            hidden = hidden + self.self_attn(positions, self.input_norm(hidden))
            self.pooler(hidden)
            return hidden + self.mlp(self.post_norm(hidden))[0]
        if residual is None:
            residual, hidden = hidden.clone(), self.input_norm(hidden)
        else:
            hidden, residual = self.input_norm(hidden, residual)
        hidden, residual = self.post_norm(self.self_attn(positions, hidden), residual)
        self.pooler(hidden)
        return self.mlp(hidden)[0], residual


class MlpLayer(Module):
    """A decoder layer without a layer that has a boundary, as hybrid models have them."""

    plain = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), Linear()

    def forward(self, positions: Any, hidden: Any, residual: Any) -> Any:
        if residual is None:
            return self.mlp(self.norm(hidden))[0], hidden.clone()
        hidden, residual = self.norm(hidden, residual)
        return self.mlp(hidden)[0], residual


class Pooler(Module):
    def forward(self, x: Any) -> Any:
        return x.mean(dim=0)


class Decoder(Module):
    def __init__(self, plain: bool) -> None:
        super().__init__()
        rotary = Rotary()
        self.embed = Embed()
        self.layers = torch.nn.ModuleList([Layer(rotary, plain), Layer(rotary, plain)])
        self.norm = Norm()

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden, residual = self.embed(input_ids), None
        for layer in self.layers:
            if layer.plain:
                hidden = layer(positions, hidden, None)
            else:
                hidden, residual = layer(positions, hidden, residual)
        return self.norm(hidden) if residual is None else self.norm(hidden, residual)[0]


class Embed(Module):
    def forward(self, input_ids: Any) -> Any:
        return (input_ids[:, None] + torch.arange(WIDTH)).float()


class Model(Module):
    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.model = Decoder(plain)
        self.head = Linear()

    def forward(self, input_ids: Any, positions: Any) -> Any:
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: Any) -> Any:
        return self.head(hidden_states)[0].repeat(1, VOCABULARY // WIDTH)


class Runner:
    """Two requests of two and one tokens, padded to four rows."""

    def __init__(self, plain: bool = False) -> None:
        self.model = Model(plain)
        self.input_batch = SimpleNamespace(req_ids=["a", "b"])
        self.hidden: Any = None

    def execute_model(self, scheduler_output: Any) -> None:
        self.hidden = self.model(input_ids=torch.tensor([5, 6, 7, 0]), positions=torch.tensor([0, 1, 0, 0]))
        self.model.compute_logits(self.hidden[[1, 2]])

    def sample_tokens(self) -> Any:
        return SimpleNamespace(req_ids=["a", "b"], sampled_token_ids=[[1], [2]])


STEP = SimpleNamespace(
    num_scheduled_tokens={"a": 2, "b": 1}, total_num_scheduled_tokens=3, scheduled_spec_decode_tokens={}
)


def tapped(
    runner: Runner,
    selection: str = "all",
    patterns: tuple[str, ...] = ("*",),
    mode: int = 0,
    level: str = MODULE,
) -> tuple[Notes, Recorder, Any]:
    notes = Notes()
    recorder = Recorder(notes)  # type: ignore[arg-type]
    context = {
        f"model.layers.{index}.self_attn.attn": layer.self_attn.attn
        for index, layer in enumerate(runner.model.model.layers)
        if hasattr(layer, "self_attn")
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context, mode=mode))
    undo = taps.install(recorder, runner, config, selection, patterns, level)
    steps.follow(steps.Steps(recorder), undo, runner)
    return notes, recorder, undo


def run(runner: Runner, recorder: Recorder, times: int = 1) -> None:
    for _ in range(times):
        runner.execute_model(STEP)
        recorder.guarded(recorder.sampled)(["a", "b"], [[1], [2]])
    recorder.finish()


def layer_sites(index: int) -> list[str]:
    stem = f"model.layers.{index}"
    return [
        *([f"{stem}.input_norm/residual"] if index else []), f"{stem}.input_norm",
        f"{stem}.self_attn.qkv_proj",
        f"{stem}.self_attn.rotary_emb/rotated_query", f"{stem}.self_attn.rotary_emb/rotated_key",
        *(f"{stem}.self_attn.attn/{part}" for part in ("query", "key", "value", "output")),
        f"{stem}.self_attn.o_proj", f"{stem}.self_attn",
        f"{stem}/residual_after_attention", f"{stem}.post_norm", f"{stem}.mlp", f"{stem}/residual",
    ]  # fmt: skip


def test_modules_are_recorded_in_execution_order() -> None:
    runner = Runner()
    notes, recorder, _ = tapped(runner)
    run(runner, recorder)
    assert recorder.errors == []
    assert [site for site, _ in notes.taken] == [
        "model/input_ids", "model/positions", "model.embed", *layer_sites(0), *layer_sites(1),
        "model.norm/residual", "model.norm", "model/hidden_states", "lm_head/logits",
    ]  # fmt: skip


def test_rows_are_as_they_were_before_a_kernel_spoilt_them() -> None:
    runner = Runner()
    notes, recorder, _ = tapped(runner)
    run(runner, recorder)
    table = dict(notes.taken)
    assert torch.equal(table["model.layers.0/residual"], table["model.layers.1.input_norm/residual"])
    assert torch.equal(table["model.layers.1/residual"], table["model.norm/residual"])
    assert torch.equal(table["model.norm"], table["model.norm/residual"] * 0.5)
    assert torch.equal(
        table["model.layers.0/residual_after_attention"],
        table["model.embed"] + table["model.layers.0.self_attn"],
    )
    assert torch.equal(table["model.norm"], runner.hidden[:3])


def test_what_is_not_recorded_is_named() -> None:
    runner = Runner()
    notes, recorder, _ = tapped(runner)
    run(runner, recorder)
    for index in range(2):
        stem = f"model.layers.{index}"
        assert notes.absent[f"{stem}.unused"] == NOT_CALLED
        assert notes.absent[f"{stem}.pooler"] == NO_ROWS
        assert notes.absent[f"{stem}.self_attn.attn.inner"] == INSIDE_OP
    assert notes.absent["head"] == NOT_CALLED  # it is called for logits, after the forward
    assert len(notes.absent) == 7


def test_a_stream_that_no_norm_takes_up_is_named() -> None:
    runner = Runner(plain=True)
    notes, recorder, _ = tapped(runner)
    run(runner, recorder)
    table = dict(notes.taken)
    assert notes.absent["model.layers.1/residual_after_attention"] == INLINE
    assert torch.equal(table["model.layers.1/residual"] * 0.5, table["model.norm"])


@pytest.mark.parametrize("alone", [False, True])
def test_the_stream_of_a_layer_without_attention_is_whole(alone: bool) -> None:
    runner = Runner()
    layers = runner.model.model.layers
    layers.append(MlpLayer())
    if alone:
        del layers[0], layers[0]
    notes, recorder, _ = tapped(runner)
    run(runner, recorder)
    assert recorder.errors == []
    table, last = dict(notes.taken), f"model.layers.{len(layers) - 1}"
    assert torch.equal(table[f"{last}/residual"], table["model.norm/residual"])
    assert last not in table


def test_a_shared_module_goes_by_the_name_its_caller_has_for_it() -> None:
    runner = Runner()
    last = runner.model.model.layers[1]
    last.mlp = last.self_attn.o_proj
    notes, recorder, _ = tapped(runner)
    run(runner, recorder, times=2)
    assert recorder.errors == []
    sites = [site for site, _ in notes.taken]
    assert sites.count("model.layers.1.self_attn.o_proj") == 2  # once a forward
    assert sites.count("model.layers.1.mlp") == 2


def test_further_calls_of_a_module_in_a_forward_are_told_apart() -> None:
    runner = Runner()
    decoder = runner.model.model
    decoder.forward = lambda ids, positions: decoder.norm(decoder.norm(decoder.embed(ids)))
    notes, recorder, _ = tapped(runner)
    run(runner, recorder, times=2)
    assert recorder.errors == []
    sites = [site for site, _ in notes.taken]
    assert sites.count("model.norm") == sites.count("model.norm@2") == 2


def test_layers_and_patterns_choose() -> None:
    runner = Runner()
    notes, recorder, _ = tapped(runner, "1", ("model.layers.*mlp", "*/residual", "model.embed"))
    run(runner, recorder)
    assert [site for site, _ in notes.taken] == [
        "model.embed", "model.layers.1.input_norm/residual", "model.layers.1.mlp", "model.layers.1/residual",
        "model.norm/residual",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("selection", "patterns", "level", "says"),
    [
        ("5", ("*",), MODULE, "--layers 5: there is no layer 5 to tap; the model has 2"),
        ("all", ("foo*",), BOUNDARY, "no site matches --sites foo\\*"),
    ],
)
def test_a_selection_of_nothing_is_refused(
    selection: str, patterns: tuple[str, ...], level: str, says: str
) -> None:
    with pytest.raises(layout.CannotTap, match=says):
        tapped(Runner(), selection, patterns, level=level)


def test_without_taps_nothing_is_left() -> None:
    runner = Runner()
    notes, recorder, undo = tapped(runner)
    undo.close()
    run(runner, recorder)
    assert notes.taken == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in runner.model.modules())


def test_dummy_forwards_are_not_recorded() -> None:
    runner = Runner()
    notes, recorder, _ = tapped(runner)
    runner.model(torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert notes.taken == []
    run(runner, recorder)
    assert recorder.errors == []
    assert len(notes.taken) == len(layer_sites(0)) + len(layer_sites(1)) + 7


def test_compiled_models_are_refused() -> None:
    with pytest.raises(layout.CannotTap, match="enforce_eager"):
        tapped(Runner(), mode=3)
