"""The digest `localizer-rowsum-128/1` of rows on a GPU, in Triton; `localizer.wire.rowsum` is its reference.

On an H200 (Triton 3.6.0) and in Triton's interpreter it gives what the reference gives; other devices were
not seen. So each worker compares the two on its own device before it uses this.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence

import torch

from localizer.hooks.layout import CannotTap, platform
from localizer.wire import rowsum, unsupported

FIELDS = 5
"""Numbers that describe a tensor to the kernel: address, bytes from row to row, bytes of a row, rows, and the
address of its digests."""

MOST_TABLES = 1024
"""So many tables of tensors are kept on the device; the steps of a decode ask for the same ones."""

CHECKED = ((1, 3), (7, 5), (8, 4), (100, 2), (6, 1), (8192, 2), (20004, 1))
"""(bytes of a row, rows) of what is compared with the reference: each width of a load, one block and more."""


def why_not(device_type: str) -> str:
    """Why rows cannot be hashed on this platform, as vLLM names it; empty if they can be."""
    if device_type != "cuda":
        return unsupported.ROW_DIGEST_PLATFORM
    try:
        importlib.import_module("triton")
    except ImportError:
        return unsupported.ROW_DIGEST_TRITON
    return ""


def check_platform() -> None:
    """Check, before an engine is built, that its rows can be hashed where they lie.

    Raises:
        CannotTap: they cannot.
    """
    if reason := why_not(platform()):
        raise CannotTap(reason)


class RowDigests:
    """Hashes rows where they lie, on the stream of the caller, without waiting for anything.

    Args:
        device: of the rows.

    Raises:
        ImportError: there is no Triton.
    """

    def __init__(self, device: torch.device) -> None:
        kernel = importlib.import_module("localizer.hooks.rowdigest_kernel")
        self._launch, self._device = kernel.launch, device
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Hash rows of several tensors by one launch, or one for each alignment of their rows in memory.

        Args:
            sources: each [rows, ...]; rows that are not contiguous are copied first.
            targets: each uint8 [rows, 16], contiguous, at multiples of 8.
        """
        groups: dict[int, list[int]] = {}
        most: dict[int, int] = {}
        kept = []  # until the launch
        for source, target in zip(sources, targets, strict=True):
            if not source.shape[0]:
                continue
            source = _plain(source)
            kept.append(source)
            size = math.prod(source.shape[1:]) * source.element_size()
            pitch = source.stride(0) * source.element_size()
            unit = math.gcd(rowsum.WORD, source.data_ptr(), pitch, size)
            groups.setdefault(unit, []).extend(
                (source.data_ptr(), pitch, size, source.shape[0], target.data_ptr())
            )
            most[unit] = max(most.get(unit, 0), source.shape[0])
        for unit, numbers in groups.items():
            self._launch(self._table(tuple(numbers)), most[unit], len(numbers) // FIELDS, unit)

    def stack(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Hash the rows of a stack of tensors by one launch.

        Args:
            source: [tensors, rows, ...].
            target: uint8 [tensors, rows, 16], contiguous, at a multiple of 8.
        """
        tensors, rows = source.shape[:2]
        if not tensors or not rows:
            return
        if not source[0, 0].is_contiguous():
            self(source.unbind(), target.unbind())
            return
        item = source.element_size()
        size, pitch, apart = source[0, 0].numel() * item, source.stride(1) * item, source.stride(0) * item
        first, digests = source.data_ptr(), target.data_ptr()
        unit = math.gcd(rowsum.WORD, first, apart, pitch, size)
        numbers = tuple(
            number
            for index in range(tensors)
            for number in (first + index * apart, pitch, size, rows, digests + index * rows * rowsum.SIZE)
        )
        self._launch(self._table(numbers), rows, tensors, unit)

    def _table(self, numbers: tuple[int, ...]) -> torch.Tensor:
        """The numbers on the device; int64."""
        found = self._tables.get(numbers)
        if found is None:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            table = torch.tensor(numbers, dtype=torch.int64)
            if self._device.type != "cpu":
                table = table.pin_memory()  # else the copy would wait for the device
            self._tables[numbers] = found = table.to(self._device, non_blocking=True)
        return found

    def check(self) -> None:
        """Compare with the reference on rows of several lengths, each as it is and with one bit flipped.

        Raises:
            CannotTap: a digest is not that of the reference.
        """
        generator = torch.Generator().manual_seed(0)
        for size, rows in CHECKED:
            host = torch.randint(0, 256, (2 * rows, size + 8), dtype=torch.uint8, generator=generator)
            host[rows:] = host[:rows]
            host[rows:, size // 2] ^= 1 << (size % 8)
            on_device = host.to(self._device)[:, :size]
            target = torch.zeros((2 * rows, rowsum.SIZE), dtype=torch.uint8, device=self._device)
            self([on_device], [target])
            found, expected = target.cpu().numpy(), rowsum.digests(host[:, :size].contiguous().numpy())
            if not (found == expected).all() or (found[:rows] == found[rows:]).all(axis=1).any():
                raise CannotTap(unsupported.ROW_DIGEST_WRONG.format(size=size, device=self._device))
        self._tables.clear()


def _plain(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, each contiguous."""
    return rows if rows[0].is_contiguous() else rows.contiguous()
