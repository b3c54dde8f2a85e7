"""Random parameters: drawn from a seed with numpy alone, so the same bytes on every machine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from localizer.workload import build

SEED = 20261130
RESEMBLANCE = 0.8
"""How much row i of a head resembles the embedding of token i - 1."""

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Parameter:
    """What a parameter is drawn from: normally distributed values of that mean and standard deviation."""

    shape: tuple[int, ...]
    mean: float
    deviation: float


def matrix(rows: int, columns: int, scale: float = 1.0) -> Parameter:
    """A projection [rows, columns] that keeps the size of what it is given, times `scale`."""
    return Parameter((rows, columns), 0.0, scale / math.sqrt(columns))


class Generator:
    """Draws in the order in which it is asked."""

    def __init__(self, seed: int | Sequence[int] = SEED) -> None:
        self._generator = np.random.default_rng(seed)

    def normal(self, *shape: int) -> np.ndarray:
        """Standard normal values, float32."""
        return self._generator.standard_normal(shape, dtype=np.float32)

    def draw(self, parameter: Parameter) -> np.ndarray:
        """A parameter in bfloat16."""
        values = self.normal(*parameter.shape) * parameter.deviation
        return bf16(values + parameter.mean if parameter.mean else values)

    def head(self, embedding: np.ndarray) -> np.ndarray:
        """A head in bfloat16 for an embedding [vocabulary, hidden] of standard normal values.

        Its row i resembles the embedding of token i - 1: greedy output neither repeats itself nor is trivial.
        """
        rows = RESEMBLANCE * np.roll(embedding, 1, axis=0) + self.normal(*embedding.shape)
        return bf16(rows / math.sqrt(embedding.shape[1]))

    def some(self, count: int, of: int) -> np.ndarray:
        """`count` different numbers below `of`, in any order."""
        return self._generator.permutation(of)[:count]


def bf16(array: np.ndarray) -> np.ndarray:
    """As bfloat16, in C order: safetensors takes memory as it lies."""
    return np.ascontiguousarray(array).astype(ml_dtypes.bfloat16)


def write(folder: Path, config: Mapping[str, Any], weights: Weights) -> None:
    """Write a model into an empty folder."""
    save_file(weights, folder / build.WEIGHTS, metadata={"format": "pt"})
    (folder / build.CONFIG).write_text(json.dumps(config, indent=1))
