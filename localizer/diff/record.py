"""What all records of a result are made of."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: immutable, keyword only."""


class Both(Record, Generic[T], frozen=True, kw_only=True):
    """The same fact of both captures."""

    candidate: T
    parent: T


class Value(Record, frozen=True, kw_only=True):
    """One element: its bytes, most significant first, and its decimal value."""

    hex: str
    decimal: str
