"""What localizer cannot capture yet, as vLLM's resolved configuration tells it.

Seen on vLLM 0.28.0 and 0.32.0; a flag that a version does not have counts as not set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from localizer.hooks.layout import CannotTap
from localizer.wire import unsupported


def check(worker: Any, ranks: int = 1) -> None:
    """Check one of `ranks` workers, which has not loaded its model yet.

    Raises:
        CannotTap: what it is about to run cannot be captured.
    """
    config = getattr(worker, "vllm_config", None)
    for sentence in (*reasons(config, getattr(worker, "model_runner", None)), *parallel(config, ranks)):
        raise CannotTap(sentence)


def parallel(config: Any, ranks: int) -> Iterator[str]:
    """Why the workers with this configuration cannot be captured, of which there should be `ranks`."""
    found = getattr(config, "parallel_config", None)
    yield from (why for name, why in unsupported.PARALLEL.items() if getattr(found, name, 1) != 1)
    there = getattr(found, "tensor_parallel_size", 1)
    if there != ranks:
        yield unsupported.OTHER_RANKS.format(there=there, ranks=ranks)


def reasons(config: Any, runner: Any) -> Iterator[str]:
    """Why a model runner with this configuration cannot be captured, the most basic reason first."""
    model = getattr(config, "model_config", None)
    if getattr(model, "runner_type", "generate") == "pooling":
        yield unsupported.POOLING
    if getattr(model, "is_encoder_decoder", False):
        yield unsupported.ENCODER_DECODER
    if getattr(runner, "supports_mm_inputs", False):
        yield unsupported.MULTIMODAL
    if getattr(runner, "uses_mrope", False) or getattr(runner, "uses_xdrope_dim", 0):
        yield unsupported.SEVERAL_POSITIONS
    if getattr(model, "enable_prompt_embeds", False):
        yield unsupported.PROMPT_EMBEDS
    if getattr(config, "lora_config", None) is not None:
        yield unsupported.LORA
