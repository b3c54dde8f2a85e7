"""The code that a tap is reached from: the nearest of vLLM's own, none where the way is generated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from localizer.hooks.callsite import call_site  # noqa: E402 - needs torch

CALLER = "def forward(call):\n    return call()\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[Any], str]]:
    """Makes functions that call what they are given, in files of a stand-in for vLLM."""
    home = tmp_path / "vllm"
    stand_in = ModuleType("vllm")
    stand_in.__file__ = str(home / "__init__.py")
    monkeypatch.setitem(sys.modules, "vllm", stand_in)

    def make(name: str) -> Callable[[Any], str]:
        space: dict[str, Any] = {}
        exec(compile(CALLER, name if name.startswith("<") else str(tmp_path / name), "exec"), space)
        return space["forward"]  # type: ignore[no-any-return]

    return make


Make = Callable[[str], Callable[[Any], str]]


def test_the_nearest_code_of_vllm_is_named(package: Make) -> None:
    model, layer = (
        package("vllm/model_executor/models/llama.py"),
        package("vllm/model_executor/layers/mla.py"),
    )
    assert model(call_site) == "vllm/model_executor/models/llama.py:2 forward"
    assert model(layer.__get__(call_site)) == "vllm/model_executor/layers/mla.py:2 forward"


@pytest.mark.parametrize("plumbing", ["attention/attention.py", "fusion/fused_act_quant.py"])
def test_what_stands_between_an_op_and_its_layer_is_passed_over(package: Make, plumbing: str) -> None:
    op = package(f"vllm/model_executor/layers/{plumbing}")
    model = package("vllm/model_executor/models/llama.py")
    assert model(op.__get__(call_site)) == "vllm/model_executor/models/llama.py:2 forward"
    assert op(call_site) == ""  # and a test is no code of vLLM's


def test_generated_code_has_no_place(package: Make) -> None:
    model = package("vllm/model_executor/models/llama.py")
    for generated in ("<eval_with_key>.3", "cache/torchinductor_root/ab/cab.py"):
        inner = package(generated)
        assert model(inner.__get__(call_site)) == ""


def test_torch_is_passed_over(package: Make) -> None:
    """The way from a module's hook to the code that called the module leads through torch."""
    found: list[str] = []
    module = torch.nn.Identity()
    module.register_forward_hook(lambda *_: found.append(inside()))
    inside = package("vllm/model_executor/models/llama.py").__get__(call_site)
    module(torch.zeros(1))
    assert found == ["vllm/model_executor/models/llama.py:2 forward"]


def test_without_vllm_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert call_site() == ""
