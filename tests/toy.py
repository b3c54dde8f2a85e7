"""The toy model and its toy draft: rows and tokens are drawn from hashes of what they are computed from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from localizer.store.dtypes import NUMPY
from localizer.store.prefix import prefix_digest
from localizer.store.schema import Site
from localizer.wire import ranks
from localizer.wire.spec import DRAFT, INPUT_IDS, LOGITS, POSITIONS

VOCABULARY = 16

Change = Callable[[np.ndarray], np.ndarray]
"""Takes the row as computed and returns the row as recorded."""


def attention(layer: int, kind: str) -> str:
    """The name of an attention site."""
    return f"model.layers.{layer}.self_attn.attn/{kind}"


def toy_token(tokens: Sequence[int]) -> int:
    """The token that the toy model returns after `tokens`."""
    return prefix_digest(tokens)[0] % (VOCABULARY - 4) + 2


def toy_proposal(tokens: Sequence[int]) -> int:
    """The token that the toy draft proposes after `tokens`: two times of three that of the toy model."""
    right = toy_token(tokens)
    return right if prefix_digest(tokens)[1] % 3 else (right + 1) % VOCABULARY


def toy_row(tokens: Sequence[int], site: Site, salt: bytes = b"", peak: int = -1) -> np.ndarray:
    """The row of a site at the last of `tokens`; `peak` is where logits are highest."""
    shape = site.shape or ()
    inputs = {INPUT_IDS: tokens[-1], POSITIONS: len(tokens) - 1}
    held = ranks.parse(site.name)
    name = held.base.removeprefix(DRAFT)
    if name in inputs:
        return np.full(shape, inputs[name], NUMPY[site.dtype])
    seed = int.from_bytes(prefix_digest(tokens, salt + replace(held, rank=None).name.encode())[:8], "little")
    random = np.random.Generator(np.random.PCG64(seed))
    if NUMPY[site.dtype].kind in "iu":
        return random.integers(1, 100, shape).astype(NUMPY[site.dtype])
    row = random.uniform(0.5, 1.5, shape).astype(NUMPY[site.dtype])
    if name == LOGITS:
        row[peak if peak >= 0 else toy_token(tokens)] = 4.0
    return row


def bump(index: tuple[int, ...] = (0,), ulps: int = 1) -> Change:
    """A change of one element by some units in the last place."""

    def change(row: np.ndarray) -> np.ndarray:
        bits = row.copy().view(np.dtype(f"u{row.dtype.itemsize}"))
        bits[index] += ulps
        return bits.view(row.dtype)

    return change


def put(value: float, index: tuple[int, ...] = (0,)) -> Change:
    """A change of one element to a value."""

    def change(row: np.ndarray) -> np.ndarray:
        row = row.copy()
        row[index] = value
        return row

    return change
