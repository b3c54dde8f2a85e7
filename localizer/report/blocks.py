"""What a report is made of before it has a form: lines, lists and tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MISSING = "—"
"""Stands in a table where there is no value."""


@dataclass(frozen=True)
class Line:
    """A paragraph; `role` says what it is: "verdict", "heading" or "text"."""

    text: str
    role: str = "text"


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Columns of text.

    `right` names the columns set flush right, `loud` the rows that matter, `bar` a column of bars drawn in #,
    `values` the columns of names and values from captures, which are set as code where there is code.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()
    loud: frozenset[int] = frozenset()
    bar: int | None = None
    values: frozenset[int] = frozenset()


Block = Line | Bullets | Table
