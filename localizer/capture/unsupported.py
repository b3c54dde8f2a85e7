"""What localizer cannot capture yet, as far as the request and the model's config.json tell it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from localizer.wire import unsupported
from localizer.wire.ranks import MOST_RANKS
from localizer.wire.spec import BOUNDARY, MODULE

POOLING_ARCHITECTURES = (
    *("ForTextEncoding", "EmbeddingModel", "ForSequenceClassification", "ForTokenClassification"),
    *("ForAudioClassification", "ForImageClassification", "ForVideoClassification", "ClassificationModel"),
    *("ForRewardModeling", "RewardModel"),
)
"""Ends of the names of architectures that vLLM takes for pooling models; of others it knows itself."""

MODALITIES = ("vision_config", "audio_config", "speech_config", "image_config", "video_config")
"""Parts of the configuration of a model that takes more than text."""


OWN_EXECUTORS = (None, "mp", "uni")
"""Values of `distributed_executor_backend` with which vLLM itself starts its workers on this machine."""


def ranks(engine: Mapping[str, Any]) -> int:
    """How many workers the engine arguments ask for.

    Raises:
        ValueError: that is no number of workers; the text says what is.
    """
    found = engine.get("tensor_parallel_size", 1)
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= MOST_RANKS:
        raise ValueError(unsupported.RANKS.format(most=MOST_RANKS))
    return found


def reasons(
    engine: Mapping[str, Any], config: Mapping[str, Any], *, taps: bool, level: str = BOUNDARY
) -> Iterator[str]:
    """Why it cannot be captured, the most basic reason first; with no `taps` only tokens are wanted.

    Args:
        engine: engine arguments.
        config: the model's config.json, empty where it is not known.
        taps: whether rows are to be recorded.
        level: what is tapped, one of `localizer.wire.spec.LEVELS`.
    """
    if _pools(engine, config):
        yield unsupported.POOLING
    if not taps:
        return
    if config.get("is_encoder_decoder") is True:
        yield unsupported.ENCODER_DECODER
    if not engine.get("language_model_only") and any(isinstance(config.get(key), dict) for key in MODALITIES):
        yield unsupported.MULTIMODAL
    if engine.get("enable_prompt_embeds"):
        yield unsupported.PROMPT_EMBEDS
    if engine.get("enable_lora"):
        yield unsupported.LORA
    yield from (why for name, why in unsupported.PARALLEL.items() if engine.get(name, 1) != 1)
    if engine.get("tensor_parallel_size", 1) != 1:
        if engine.get("distributed_executor_backend") not in OWN_EXECUTORS or engine.get("nnodes", 1) != 1:
            yield unsupported.EXECUTOR
        if level == MODULE:
            yield unsupported.MODULES_OF_RANKS


def _pools(engine: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether vLLM is to run the model as a pooling model."""
    if (runner := engine.get("runner", "auto")) != "auto":
        return bool(runner == "pooling")
    if engine.get("convert", "auto") not in ("auto", "none"):
        return True
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    return isinstance(first, str) and first.endswith(POOLING_ARCHITECTURES)
