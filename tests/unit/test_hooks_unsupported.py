"""What the worker refuses before it loads its model; vLLM's configuration is doubled."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

import localizer
from localizer.hooks.layout import CannotTap
from localizer.hooks.unsupported import check, reasons
from localizer.wire import unsupported


def worker(
    model: dict[str, object] | None = None, runner: dict[str, object] | None = None, **config: object
) -> SimpleNamespace:
    """A worker whose configuration has these flags, and for the rest none."""
    configuration = SimpleNamespace(model_config=SimpleNamespace(**model or {}), **config)
    return SimpleNamespace(vllm_config=configuration, model_runner=SimpleNamespace(**runner or {}))


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (worker({"runner_type": "pooling"}), unsupported.POOLING),
        (worker({"is_encoder_decoder": True}), unsupported.ENCODER_DECODER),
        (worker(runner={"supports_mm_inputs": True}), unsupported.MULTIMODAL),
        (worker(runner={"uses_mrope": True}), unsupported.SEVERAL_POSITIONS),
        (worker(runner={"uses_xdrope_dim": 4}), unsupported.SEVERAL_POSITIONS),
        (worker({"enable_prompt_embeds": True}), unsupported.PROMPT_EMBEDS),
        (worker(lora_config=object()), unsupported.LORA),
        (worker({"runner_type": "pooling"}, {"supports_mm_inputs": True}), unsupported.POOLING),
    ],
)
def test_what_is_refused(refused: SimpleNamespace, sentence: str) -> None:
    with pytest.raises(CannotTap) as error:
        check(refused)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    "fine",
    [
        worker(),
        SimpleNamespace(),
        worker(
            {"runner_type": "generate", "is_encoder_decoder": False, "enable_prompt_embeds": False},
            {"supports_mm_inputs": False, "uses_mrope": False, "uses_xdrope_dim": 0},
            lora_config=None,
        ),
    ],
)
def test_what_is_not(fine: SimpleNamespace) -> None:
    assert list(reasons(getattr(fine, "vllm_config", None), getattr(fine, "model_runner", None))) == []
    check(fine)


def parallel(**sizes: int) -> SimpleNamespace:
    """A worker of these numbers of workers."""
    return worker(parallel_config=SimpleNamespace(**sizes))


@pytest.mark.parametrize("name", unsupported.PARALLEL)
def test_other_kinds_of_parallelism_are_refused(name: str) -> None:
    with pytest.raises(CannotTap) as error:
        check(parallel(**{name: 2}))
    assert str(error.value) == unsupported.PARALLEL[name]


def test_as_many_workers_as_the_engine_arguments_say() -> None:
    check(parallel(tensor_parallel_size=2, pipeline_parallel_size=1), 2)
    with pytest.raises(CannotTap, match="started 2 workers instead of the 1 that"):
        check(parallel(tensor_parallel_size=2))


def test_the_sentences_are_sentences_with_a_next_step() -> None:
    module = ast.parse((Path(localizer.__file__).parent / "wire" / "unsupported.py").read_text())
    names = [node.targets[0].id for node in module.body if isinstance(node, ast.Assign)]  # type: ignore[attr-defined]
    said = [getattr(unsupported, name) for name in names if name.isupper() and name[0] != "_"]
    for sentence in (text for one in said for text in (one.values() if isinstance(one, dict) else [one])):
        assert "; " in sentence
        assert not sentence.endswith(".")
        assert sentence.isprintable()
