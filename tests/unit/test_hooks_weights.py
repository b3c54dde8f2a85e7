"""Every parameter and buffer has a digest, also one that is packed and gone when the run is over."""

from __future__ import annotations

import sys
from hashlib import blake2b
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from localizer.hooks import weights  # noqa: E402 - needs torch


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t())
        self.tied = self.first
        self.scalar = torch.nn.Parameter(torch.tensor(2.0))
        self.empty = torch.nn.Parameter(torch.empty(0))
        self.register_buffer("table", torch.arange(5))


def runner(model: Any, draft: Any = None) -> Any:
    return SimpleNamespace(model=model, drafter=SimpleNamespace(model=draft))


def expected(text: str, blob: bytes) -> str:
    return blake2b(text.encode() + blob, digest_size=16).hexdigest()


def test_digests() -> None:
    model = Model()
    found = weights.weight_facts(runner(model))
    tensors = found["tensors"]
    assert list(tensors) == ["empty", "first", "scalar", "table"]
    elements = model.first.detach().contiguous().view(torch.uint8).numpy().tobytes()
    assert tensors["first"] == expected("bfloat16 [3, 2]\n", elements)
    assert tensors["scalar"] == expected("float32 []\n", torch.tensor([2.0]).numpy().tobytes())
    assert tensors["table"] == expected("int64 [5]\n", torch.arange(5).numpy().tobytes())
    assert tensors["empty"] == ""
    lines = "".join(f"{name} {tensors[name]}\n" for name in sorted(tensors))
    assert found["digest"] == expected(lines, b"")
    assert found["algorithm"] == "blake2b-128"


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    whole = weights.weight_facts(runner(model))
    monkeypatch.setattr(weights, "CHUNK_BYTES", 5)
    assert weights.weight_facts(runner(model)) == whole


def test_a_draft_s_own_weights() -> None:
    model, draft = Model(), Model()
    draft.first = model.first
    found = weights.weight_facts(runner(model, draft))["tensors"]
    assert [name for name in found if name.startswith("draft:")] == [
        "draft:empty",
        "draft:scalar",
        "draft:table",
        "draft:tied",
    ]
    assert found["draft:table"] == found["table"]


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module as vLLM's loaders are, which packs the weights of a model away."""

    def process_weights_after_loading(model: Any, config: Any, device: Any) -> str:
        model.first = torch.nn.Parameter(torch.empty(0))
        return "packed"

    module: Any = ModuleType("toy_loader")
    module.process_weights_after_loading = process_weights_after_loading
    monkeypatch.setitem(sys.modules, "toy_loader", module)
    monkeypatch.setattr(weights, "LOADERS", "toy_loader")
    weights.arrange()
    weights.arrange()
    return module


def test_packed_weights_are_hashed_before(loader: Any) -> None:
    model, other = Model(), Model()
    whole = weights.weight_facts(runner(other))["tensors"]["first"]
    assert loader.process_weights_after_loading(model, None, torch.device("cpu")) == "packed"
    assert weights.weight_facts(runner(model))["tensors"]["first"] == whole


def test_elsewhere_nothing_is_hashed_while_loading(loader: Any) -> None:
    model = Model()
    loader.process_weights_after_loading(model, None, torch.device("meta"))
    assert weights.weight_facts(runner(model))["tensors"]["first"] == ""


def test_a_fault_does_not_keep_a_model_from_loading(loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "digest", lambda tensor: 1 / 0)
    assert loader.process_weights_after_loading(Model(), None, "cpu") == "packed"


def test_a_loader_of_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "LOADERS", "no.such.module")
    weights.arrange()
