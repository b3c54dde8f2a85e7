"""Functions and classes for the tests of probes to count calls of."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

TABLE: dict[int, int] = {}

number = 7


def squared(value: int) -> int:
    """Its square, kept in TABLE."""
    if value < 0:
        raise ValueError("negative")
    return TABLE.setdefault(value, value * value)


@functools.lru_cache
def remembered(value: int) -> int:
    """Twice the value."""
    return value * 2


class Base:
    """Has a method that others inherit."""

    def inherited(self) -> str:
        return "base"


class Cache(Base):
    """All kinds of attributes."""

    made: ClassVar[dict[int, int]] = {}

    def __init__(self) -> None:
        self.kept: dict[int, int] = {}

    def get(self, key: int, *, factor: int = 1) -> int:
        return self.kept.setdefault(key, key * factor)

    @property
    def size(self) -> int:
        return len(self.kept)

    @size.setter
    def size(self, value: int) -> None:
        self.kept = dict.fromkeys(range(value), 0)

    @staticmethod
    def double(value: int) -> int:
        return Cache.made.setdefault(value, value * 2)

    @classmethod
    def build(cls, value: int) -> Any:
        cls.made[value] = value
        return cls

    @functools.cached_property
    def once(self) -> int:
        return 1
