"""The bytes of a tensor, whatever its strides are."""

from __future__ import annotations

import torch


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements in C order, on the host; memory of the tensor itself where that is so.

    A dimension of size 1 may have any stride, and torch then calls a tensor contiguous that it cannot view
    as bytes.
    """
    flat = tensor.detach().reshape(-1)
    if flat.stride() != (1,):
        flat = flat.clone(memory_format=torch.contiguous_format)
    return memoryview(flat.view(torch.uint8).cpu().numpy())
