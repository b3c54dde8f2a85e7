"""Is a capture what its records say, and does it hold all that it should?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from localizer.errors import DamagedCapture
from localizer.store.expected import applicable
from localizer.store.reader import Capture
from localizer.store.selfcheck import mistraced, unaccounted, unfinished

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
        _ = capture.steps
        check_payload(capture)
        check_coverage(capture)
    except DamagedCapture as error:
        return Verification(DAMAGED, [str(error)], 0, 0, 0)
    size = sum(file.size for file in capture.files)
    state = SOUND if capture.complete else INCOMPLETE
    return Verification(state, capture.reasons, len(capture.files), size, len(capture.table))


def check_payload(capture: Capture) -> None:
    """Check that every stored row has the digest that the table gives.

    Raises:
        DamagedCapture: one has not.
    """
    table, index = capture.table, {site.name: number for number, site in enumerate(capture.sites)}
    for name, parts in capture.payload.items():
        for part in parts:
            kept = part.file.array(part.name)
            for row, stored in zip(part.rows, kept, strict=True):
                wanted = table.digest[row, index[name]].tobytes()
                if not table.present[row, index[name]] or xxhash.xxh3_128_digest(stored.tobytes()) != wanted:
                    raise DamagedCapture(
                        f"{part.file.path} is damaged: row {row} of {name} does not have its digest; "
                        "fetch or make the capture again."
                    )


def check_coverage(capture: Capture) -> None:
    """Check that a complete capture holds all rows that its own row table asks for.

    Raises:
        DamagedCapture: it says so, but it does not.
    """
    if capture.manifest is None or not capture.complete:
        return
    counts = capture.manifest.counts
    wrong = [name for name in ("rows_without_prefix", "prompt_mismatches") if counts.get(name)]
    reasons = [f"it counts {counts[name]} {name}" for name in wrong]
    reasons += unfinished(capture.manifest.outputs)
    if capture.open.observer.taps:
        reasons += unaccounted(capture, capture.manifest.outputs)
    reasons += mistraced(capture, counts)
    if reasons:
        raise DamagedCapture(
            f"{capture.folder} is damaged: it is said to be complete, but {reasons[0]}; "
            "fetch or make the capture again."
        )
    for number, site in enumerate(capture.sites):
        wanted = int(applicable(capture.table.columns, site.rows).sum())
        coverage = capture.manifest.coverage[site.name]
        held = int(capture.table.present[:, number].sum())
        if not wanted == coverage.expected == coverage.recorded == held:
            raise DamagedCapture(
                f"{capture.folder} is damaged: it is said to be complete, but holds {held} of "
                f"{wanted} rows of {site.name}; fetch or make the capture again."
            )
