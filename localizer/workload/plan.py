"""From options to a workload: matrix, prompts, sampling."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localizer.errors import LocalizerError
from localizer.store.schema import MAX_REQUESTS

MATRIX = "1,2,4,8,4,2,1"
"""The default batch sizes of the rounds."""

COMMON_VOCABULARY = 1000
"""Token ids below this exist in every language model; used where the model's vocabulary size is not known."""


def parse_matrix(text: str, repeats: int = 1) -> list[int]:
    """Batch sizes from text such as `1,2,4`, to be passed over `repeats` times.

    Raises:
        LocalizerError: a size is not a positive whole number, or there are too many requests.
    """
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if sum(sizes) * repeats > MAX_REQUESTS:
        raise LocalizerError(f"That matrix makes more than {MAX_REQUESTS:,} requests; make it smaller.")
    if not sizes or min(sizes) < 1:
        raise LocalizerError(
            f"The matrix {text!r} is not a list of batch sizes; give positive whole numbers such as {MATRIX}."
        )
    return sizes


def configuration(model: Path) -> dict[str, Any]:
    """The config.json of a local model; empty where there is none."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def vocabulary(model: Path) -> int:
    """Vocabulary size from the config.json of a local model, or `COMMON_VOCABULARY` where there is none."""
    config = configuration(model)
    for part in (config, config.get("text_config")):
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if isinstance(size, int) and size > 0:
            return int(size)
    return COMMON_VOCABULARY


def draw_prompts(count: int, length: int, vocabulary_size: int, seed: int) -> list[list[int]]:
    """`count` distinct prompts of `length` token ids; prompt i depends on the seed and i alone.

    Raises:
        LocalizerError: so many distinct prompts of that length do not exist.
    """
    if vocabulary_size ** min(length, MAX_REQUESTS.bit_length()) < count:
        raise LocalizerError(
            f"There are no {count} distinct prompts of {length} tokens; "
            "ask for longer prompts (--prompt-tokens)."
        )
    prompts: dict[tuple[int, ...], None] = {}
    for index in range(count):
        generator = np.random.default_rng([seed, index])
        prompt = None
        while prompt is None or prompt in prompts:
            prompt = tuple(int(token) for token in generator.integers(0, vocabulary_size, length))
        prompts[prompt] = None
    return [list(prompt) for prompt in prompts]


def greedy(max_tokens: int, logprobs: int | None = None) -> dict[str, Any]:
    """Sampling parameters of the default workload: greedy, always `max_tokens` long.

    With `logprobs`, vLLM returns those of so many tokens beside each: 0 of the selected one, -1 of all.
    """
    asked = {} if logprobs is None else {"logprobs": logprobs}
    return {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False} | asked


def parse_pairs(pairs: Sequence[str], option: str, *, values: bool) -> dict[str, Any]:
    """`key=value` options as a table; with `values`, a value that is JSON is taken as such.

    Raises:
        LocalizerError: a pair has no `=` or an empty key.
    """
    table: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise LocalizerError(f"{option} {pair!r} is not KEY=VALUE; write for example {option} key=value.")
        try:
            table[key] = json.loads(text) if values else text
        except (ValueError, RecursionError):
            table[key] = text
    return table
