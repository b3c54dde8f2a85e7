"""Expected output: files in tests/gold/, remade with LOCALIZER_UPDATE_GOLD=1 and then read by a person."""

from __future__ import annotations

import difflib
import os
from itertools import islice
from pathlib import Path

import pytest

GOLD = Path(__file__).parent / "gold"

LINES, WIDEST = 60, 300
"""How much of a difference is shown: a page has lines of 100,000 characters."""


def check(name: str, text: str, folder: Path = GOLD) -> None:
    """Compare `text`, byte for byte, with the file `name` of a folder."""
    path = folder / name
    if os.environ.get("LOCALIZER_UPDATE_GOLD"):
        path.write_bytes(text.encode())
    assert path.exists(), f"make {path.name} with LOCALIZER_UPDATE_GOLD=1"
    expected = path.read_bytes().decode()
    if text != expected:
        changes = difflib.unified_diff(expected.splitlines(), text.splitlines(), name, "as it is made now")
        pytest.fail("\n".join(line.rstrip()[:WIDEST] for line in islice(changes, LINES)))
