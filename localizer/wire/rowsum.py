"""The row digest that a GPU computes where the rows lie: `localizer-rowsum-128/1`, here in numpy.

Two sums of mixed words, so that they can be taken in any order. docs/capture-format.md defines it, and says
what it is good for; `localizer.hooks.rowdigest` is the same in Triton.
"""

from __future__ import annotations

import numpy as np

ROWSUM = "localizer-rowsum-128/1"
"""The name of the algorithm; any change to what it computes is another one."""

SIZE, WORD = 16, 8
"""Bytes of a digest, and of a word."""

SEED_A, STEP_A = 0x243F6A8885A308D3, 0x9E3779B97F4A7C15
SEED_B, STEP_B = 0x13198A2E03707344, 0xD1B54A32D192ED03
"""The key of word i is SEED + (i + 1) * STEP; the steps are odd, so that no two words have the same key."""

MIX_A = (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
"""The finaliser of SplitMix64 (variant 13 of D. Stafford): shift, multiplier, shift, multiplier, shift."""

MIX_B = (33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33)
"""The finaliser of MurmurHash3 (A. Appleby), for 64 bits."""

WORDS_AT_ONCE = 1 << 18
"""So many words of all rows are mixed at a time: memory stays small, and in the cache."""


def digests(rows: np.ndarray) -> np.ndarray:
    """The digests of rows of equal length.

    Args:
        rows: uint8 [rows, bytes].

    Returns:
        uint8 [rows, 16].
    """
    count, size = rows.shape
    words = -(-size // WORD)
    padded = np.zeros((count, words * WORD), np.uint8)
    padded[:, :size] = rows
    table = padded.view("<u8").astype(np.uint64, copy=False)
    sums = np.full((2, count), [[SEED_A], [SEED_B]], np.uint64)
    step = max(1, WORDS_AT_ONCE // max(count, 1))
    for start in range(0, words, step):
        part = table[:, start : start + step]
        number = np.arange(start + 1, start + 1 + part.shape[1], dtype=np.uint64)
        sums[0] += _mix(part ^ _keys(number, SEED_A, STEP_A), MIX_A).sum(axis=1, dtype=np.uint64)
        sums[1] += _mix(part ^ _keys(number, SEED_B, STEP_B), MIX_B).sum(axis=1, dtype=np.uint64)
    length = np.uint64(size)
    first, second = _mix(sums[0] + length, MIX_A), _mix(sums[1] + length, MIX_B)
    first = first + second
    second = second + first
    return np.stack([first, second], axis=1).astype("<u8").view(np.uint8)


def _keys(number: np.ndarray, seed: int, step: int) -> np.ndarray:
    return number * np.uint64(step) + np.uint64(seed)


def _mix(words: np.ndarray, how: tuple[int, int, int, int, int]) -> np.ndarray:
    """A bijection of 64 bits, in which each bit of a word changes about half of the result's."""
    for shift, multiplier in ((how[0], how[1]), (how[2], how[3])):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(multiplier)
    return words ^ (words >> np.uint64(how[4]))
