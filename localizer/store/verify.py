"""Is a capture what its records say, and does it hold all that it should?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localizer.errors import DamagedCapture, NotACapture
from localizer.store.archive import Archive, check, named
from localizer.store.digest import row_digest
from localizer.store.expected import applicable
from localizer.store.reader import Capture
from localizer.store.selfcheck import apart, mistraced, unaccounted, unfinished

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


@dataclass(frozen=True)
class ArchiveVerification:
    """The state of an archive: the worst of itself and its captures.

    Attributes:
        state, reasons: as of a capture; `reasons` only of what is wrong with the archive itself.
        members: how many have their checksums.
        captures: what was found of each capture, by what it is called.
    """

    state: str
    reasons: list[str]
    members: int
    captures: dict[str, Verification]


def verify_archive(path: Path) -> ArchiveVerification:
    """Check the checksums of an archive and every capture in it.

    Raises:
        NotACapture: the file is no archive, or holds no captures.
    """
    found: dict[str, Verification] = {}
    try:
        archive = Archive(path)
        members = check(archive)
        for name in archive.captures:
            with archive.opened(name) as capture:
                found[capture.shown] = verify(capture.folder)
    except DamagedCapture as error:
        return ArchiveVerification(DAMAGED, [named(str(error))], 0, found)
    if not found:
        raise NotACapture(f"{archive.shown} holds no captures; name an archive that localize attach made.")
    states = {result.state for result in found.values()}
    worst = next(state for state in (DAMAGED, INCOMPLETE, SOUND) if state in states)
    return ArchiveVerification(worst, [], members, found)


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
        return Verification(DAMAGED, [named(str(error))], 0, 0, 0)
    size = sum(file.size for file in capture.files)
    state = SOUND if capture.complete else INCOMPLETE
    return Verification(state, capture.reasons, len(capture.files), size, len(capture.table))


def check_payload(capture: Capture) -> None:
    """Check that every stored row has the digest that the table gives.

    Raises:
        DamagedCapture: one has not.
    """
    for part in capture.sets:
        sites = part.kept()
        if not sites:
            continue
        ordered = part.ordered
        columns = {site.name: number for number, site in enumerate(ordered)}
        digest, present = part.digest(0, part.count), part.present(0, part.count)
        for name in sites:
            rows, column = part.kept_rows(name), columns[name]
            algorithm = ordered[column].digest
            assert part.payload is not None
            kept = part.open(part.payload).array(name)
            for row, stored, wanted, there in zip(
                rows, kept, digest[rows, column], present[rows, column], strict=True
            ):
                if not there or row_digest(algorithm, stored.tobytes()) != wanted.tobytes():
                    raise capture.damaged_row(name, part.start + int(row))


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
    reasons += mistraced(capture, counts) + apart(capture)
    if reasons:
        raise DamagedCapture(
            f"{capture.folder} is damaged: it is said to be complete, but {reasons[0]}; "
            "fetch or make the capture again."
        )
    recorded = capture.table.recorded()
    for number, site in enumerate(capture.sites):
        wanted = int(applicable(capture.table.columns, site.rows).sum())
        coverage = capture.manifest.coverage[site.name]
        held = int(recorded[number])
        if not wanted == coverage.expected == coverage.recorded == held:
            raise DamagedCapture(
                f"{capture.folder} is damaged: it is said to be complete, but holds {held} of "
                f"{wanted} rows of {site.name}; fetch or make the capture again."
            )
