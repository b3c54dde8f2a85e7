"""A stand-in for the sink that keeps what the recorder hands it, for tests of taps without a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Notes:
    """Keeps messages, names of sites in the order of their announcement, and copies of the rows."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.absent: dict[str, str] = {}
        self.taken: list[tuple[str, Any]] = []

    def message(self, **content: Any) -> None:
        """Take a message."""
        self.messages.append(content)
        if content["type"] == "sites":
            self.names += [name for name, _ in content["sites"]]
            self.absent |= content["not_applicable"]
        elif content["type"] == "site":
            self.names.append(content["name"])
        elif content["type"] == "absent":
            self.absent |= content["sites"]

    def rows(self, sites: Sequence[int | None], tensors: Sequence[Any], count: int) -> None:
        """Take rows."""
        for site, tensor in zip(sites, tensors, strict=True):
            if site is not None and tensor is not None:
                self.taken.append((self.names[site], tensor[:count].clone()))

    def later(self, tensor: Any, convert: Any = None) -> Any:
        """The elements, at once."""
        return tensor.tolist() if convert is None else convert(tensor.tolist())

    def stack(self, sites: Sequence[int], tensors: Any, count: int) -> None:
        """Take rows of a stack."""
        self.rows(sites, tensors.unbind(), count)

    def flush(self) -> None:
        """Take the end of a step."""

    def count(self, **counters: int) -> None:
        """Take counters."""

    def warm(self) -> None:
        """Map no ring."""

    def close(self) -> None:
        """Take the end."""
