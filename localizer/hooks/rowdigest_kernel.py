"""The kernel of `localizer.hooks.rowdigest`: imported only where rows are hashed, since it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from localizer.wire import rowsum

BLOCK = 512
"""Words that a program takes at a time."""

SEED_A, STEP_A, SEED_B, STEP_B = (
    tl.constexpr(number) for number in (rowsum.SEED_A, rowsum.STEP_A, rowsum.SEED_B, rowsum.STEP_B)
)
A1, A2, A3, A4, A5 = map(tl.constexpr, rowsum.MIX_A)
B1, B2, B3, B4, B5 = map(tl.constexpr, rowsum.MIX_B)


@triton.jit
def _mix_a(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> A1)) * A2
    x = (x ^ (x >> A3)) * A4
    return x ^ (x >> A5)


@triton.jit
def _mix_b(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> B1)) * B2
    x = (x ^ (x >> B3)) * B4
    return x ^ (x >> B5)


@triton.jit
def _hash(table, unit: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program hashes row `program_id(0)` of tensor `program_id(1)`, loading unit bytes at a time."""
    row = tl.program_id(0).to(tl.int64)
    entry = table + tl.program_id(1) * 5
    source = tl.load(entry)
    pitch = tl.load(entry + 1)
    size = tl.load(entry + 2)
    count = tl.load(entry + 3)
    target = tl.load(entry + 4)
    if row < count:
        base = source + row * pitch
        if unit == 8:
            units = base.to(tl.pointer_type(tl.uint64))
        elif unit == 4:
            units = base.to(tl.pointer_type(tl.uint32))
        elif unit == 2:
            units = base.to(tl.pointer_type(tl.uint16))
        else:
            units = base.to(tl.pointer_type(tl.uint8))
        words = (size + 7) // 8
        first = tl.zeros([block], tl.uint64)
        second = tl.zeros([block], tl.uint64)
        for start in range(0, words, block):
            index = start + tl.arange(0, block).to(tl.int64)
            word = tl.zeros([block], tl.uint64)
            for part in tl.static_range(8 // unit):
                at = index * (8 // unit) + part
                piece = tl.load(units + at, mask=at * unit < size, other=0)
                word |= piece.to(tl.uint64) << (8 * unit * part)
            number = (index + 1).to(tl.uint64)
            there = (index < words).to(tl.uint64)
            first += _mix_a(word ^ (number * STEP_A + SEED_A)) * there
            second += _mix_b(word ^ (number * STEP_B + SEED_B)) * there
        length = size.to(tl.uint64)
        a = _mix_a(tl.sum(first, axis=0) + SEED_A + length)
        b = _mix_b(tl.sum(second, axis=0) + SEED_B + length)
        a = a + b
        b = b + a
        digest = (target + row * 16).to(tl.pointer_type(tl.uint64))
        tl.store(digest, a)
        tl.store(digest + 1, b)


def launch(table: torch.Tensor, rows: int, tensors: int, unit: int) -> None:
    """Hash the rows of tensors that a table describes.

    Args:
        table: int64 [tensors * 5], on the device, see `localizer.hooks.rowdigest.FIELDS`.
        rows: the most of any tensor.
        tensors: how many there are.
        unit: bytes to load at a time, of which addresses and lengths are multiples: 1, 2, 4 or 8.
    """
    _hash[(rows, tensors)](table, unit=unit, block=BLOCK, num_warps=4)
