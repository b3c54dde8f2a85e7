"""Block tables: which KV blocks hold the tokens of each request of a batch, wherever they are kept.

The V1 model runner keeps them in numpy (seen on vLLM 0.28.0 and 0.32.0). Model Runner V2 gathers them on the
device for each step and hands them to `model_state.prepare_attn(..., block_tables, slot_mappings, ...)`: a
tensor for each KV cache group, int32 [requests or more, blocks], rows in batch order; block sizes are in
`runner.block_tables.block_sizes` (0.32.0), or, where kernels take smaller blocks than the cache manager does,
in `kernel_block_sizes` beside it (0.26.0). So it is in the sources of both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Tables(Protocol):
    """The block tables of one step.

    Attributes:
        sizes: by KV cache group, the tokens of a block.
    """

    @property
    def sizes(self) -> Sequence[int]: ...

    def blocks(self, group: int, row: int, count: int) -> torch.Tensor:
        """int64 [count]: the first blocks of the request in row `row` of the batch."""


class HostTables:
    """Those of the V1 model runner: `runner.input_batch.block_table.block_tables`."""

    def __init__(self, tables: Sequence[Any]) -> None:
        self._tables = tables

    @property
    def sizes(self) -> Sequence[int]:
        return [int(table.block_size) for table in self._tables]

    def blocks(self, group: int, row: int, count: int) -> torch.Tensor:
        return torch.from_numpy(self._tables[group].get_numpy_array()[row, :count].astype("int64"))


@dataclass(frozen=True)
class DeviceTables:
    """Those of a step of Model Runner V2.

    Attributes:
        groups: each int32 [requests or more, blocks], on the device.
    """

    groups: Sequence[torch.Tensor]
    sizes: Sequence[int]

    def blocks(self, group: int, row: int, count: int) -> torch.Tensor:
        return self.groups[group][row, :count].long()


def binder(method: Callable[..., Any]) -> Callable[[Sequence[Any], Mapping[str, Any]], Mapping[str, Any]]:
    """What gives the arguments of a call by name; nothing where they do not fit."""
    signature = inspect.signature(method)

    def arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return signature.bind(*args, **kwargs).arguments
        except TypeError:
            return {}

    return arguments


def device_tables(runner: Any, groups: Any, requests: int) -> DeviceTables | None:
    """The tables that a step of Model Runner V2 was given; None if they are not as described above."""
    tables = getattr(runner, "block_tables", None)
    sizes = getattr(tables, "kernel_block_sizes", getattr(tables, "block_sizes", None))
    if not isinstance(groups, (list, tuple)) or not isinstance(sizes, (list, tuple)):
        return None
    fit = all(
        isinstance(group, torch.Tensor)
        and group.dtype == torch.int32
        and group.dim() == 2
        and group.shape[0] >= requests
        for group in groups
    )
    if not fit or not groups or len(groups) != len(sizes):
        return None
    return DeviceTables(groups, [int(size) for size in sizes])
