"""Expected output: files in tests/gold/, remade with LOCALIZER_UPDATE_GOLD=1 and then read by a person."""

from __future__ import annotations

import os
from pathlib import Path

GOLD = Path(__file__).parent / "gold"


def check(name: str, text: str) -> None:
    """Compare `text` with the gold file `name`."""
    path = GOLD / name
    if os.environ.get("LOCALIZER_UPDATE_GOLD"):
        path.write_text(text)
    assert path.exists(), f"make {path.name} with LOCALIZER_UPDATE_GOLD=1"
    assert text == path.read_text()
