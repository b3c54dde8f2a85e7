"""Where in a TOML text a key stands."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

MOST = 1000
"""Lines that are looked at: their number is squared."""


def line_of(text: str, path: Sequence[str]) -> int | None:
    """Number, from 1, of the line on which the value at `path` begins; None where there is no such value.

    The parser itself says so: a value begins behind the last line up to which the text is whole without it.
    """
    lines = text.split("\n")
    begins = 0
    for number in range(1, min(len(lines), MOST) + 1):
        try:
            tree = tomllib.loads("\n".join(lines[:number]))
        except (ValueError, RecursionError):
            continue  # in the middle of a value
        if _has(tree, path):
            written = (i for i in range(begins, number) if lines[i].strip() and lines[i].strip()[0] != "#")
            return next(written, begins) + 1
        begins = number
    return None


def _has(tree: Any, path: Sequence[str]) -> bool:
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True
