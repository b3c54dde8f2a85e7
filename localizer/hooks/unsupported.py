"""What localizer cannot capture yet, as vLLM's resolved configuration tells it.

Seen on vLLM 0.28.0 and 0.32.0; a flag that a version does not have counts as not set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from localizer.hooks.layout import CannotTap
from localizer.wire import unsupported


def check(worker: Any) -> None:
    """Check a worker that has not loaded its model yet.

    Raises:
        CannotTap: what it is about to run cannot be captured.
    """
    for sentence in reasons(getattr(worker, "vllm_config", None), getattr(worker, "model_runner", None)):
        raise CannotTap(sentence)


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
