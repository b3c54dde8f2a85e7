"""Is a capture what its records say, and does it hold all that it should?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localizer.errors import DamagedCapture
from localizer.store.reader import Capture

SOUND, DAMAGED, INCOMPLETE = "sound", "damaged", "incomplete"

EXIT_CODES = {SOUND: 0, DAMAGED: 1, INCOMPLETE: 3}


@dataclass(frozen=True)
class Verification:
    """The state of a capture, why, and how much was checked (files, bytes, rows)."""

    state: str
    reasons: list[str]
    files: int
    size: int
    rows: int


def verify(folder: Path) -> Verification:
    """Check a capture whole.

    Raises:
        NotACapture: the folder holds no capture.
    """
    try:
        capture = Capture(folder)
        capture.check()
    except DamagedCapture as error:
        return Verification(DAMAGED, [str(error)], 0, 0, 0)
    size = sum(file.size for file in capture.files)
    state = SOUND if capture.complete else INCOMPLETE
    return Verification(state, capture.reasons, len(capture.files), size, len(capture.table))
