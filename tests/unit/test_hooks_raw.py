"""Bytes of tensors of any strides, those of size 1 included, for which torch accepts any."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from localizer.hooks import weights  # noqa: E402 - needs torch
from localizer.hooks.raw import raw_bytes  # noqa: E402

ROWS = torch.arange(24, dtype=torch.float32).to(torch.bfloat16)


@pytest.mark.parametrize(
    "tensor",
    [
        ROWS.view(4, 6), ROWS.view(4, 6).t(), ROWS[::2], ROWS[::2][:1], ROWS[3], ROWS[:0],
        ROWS.as_strided((6, 1), (1, 300)), ROWS[:1].expand(5),
    ],
)  # fmt: skip
def test_elements_come_in_c_order(tensor: Any) -> None:
    plain = torch.tensor(tensor.tolist(), dtype=torch.bfloat16).reshape(tensor.shape)
    assert raw_bytes(tensor).tobytes() == plain.reshape(-1).view(torch.int16).numpy().tobytes()
    assert weights.digest(tensor) == weights.digest(plain)
