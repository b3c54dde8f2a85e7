"""One phase of a capture, seen as a capture of its own: its rows, tokens and steps."""

from __future__ import annotations

from functools import cached_property

import msgspec
import numpy as np

from localizer.errors import DamagedCapture, LocalizerError
from localizer.store import schema
from localizer.store.reader import Capture
from localizer.store.schema import Open
from localizer.store.sets import RowSet, Stacked, Table, Windowed
from localizer.store.trace import StepTrace


def phase_of(opening: Open) -> dict[str, tuple[int, str]]:
    """By request the number of its phase, and its id in the first phase; empty without phases."""
    done, work = opening.intervention, opening.workload
    if done is None:
        return {}
    first = schema.rounds(work.matrix, done.repeats)
    every = schema.rounds(work.matrix, work.repeats)
    return {
        name: (number // len(first), first[number % len(first)][index])
        for number, names in enumerate(every)
        for index, name in enumerate(names)
    }


class Window(Windowed):
    """The rows [start, stop) of an array over all rows of a capture."""

    def __init__(self, whole: Stacked, start: int, stop: int) -> None:
        self._whole, self._start = whole, start
        self.shape, self.dtype = (stop - start, *whole.shape[1:]), whole.dtype

    def _run(self, start: int, stop: int) -> np.ndarray:
        return self._whole[self._start + start : self._start + stop]

    def _pick(self, rows: np.ndarray) -> np.ndarray:
        return self._whole[rows + self._start]


class Phase(Capture):
    """A view of one phase. Request ids are those of the first phase; steps keep their numbers in the capture.

    What was kept of single rows is read from the capture; whole sets are not (`sets` is empty), since the
    border of two phases may lie within one. Weights were hashed when all phases were over: of a single one
    nothing is known.

    Args:
        capture: a capture with phases.
        phase: the name of one.

    Raises:
        LocalizerError: the capture has no such phase.
        DamagedCapture: rows of two phases are mixed.
    """

    def __init__(self, capture: Capture, phase: str) -> None:
        done = capture.open.intervention
        if done is None or phase not in done.phases:
            raise LocalizerError(
                f"{capture.folder} has no phase {phase}; make a capture with localize intervene."
            )
        work = msgspec.structs.replace(capture.open.workload, repeats=done.repeats)
        self._whole, self.phase, self.folder = capture, phase, capture.folder
        self.shown = capture.shown
        self.open = msgspec.structs.replace(capture.open, workload=work, intervention=None)
        self._number, self._count = done.phases.index(phase), sum(work.matrix) * done.repeats
        self.files = capture.files
        self.manifest = capture.manifest
        if capture.manifest is not None:
            places = phase_of(capture.open)
            outputs = [
                msgspec.structs.replace(output, request=places[output.request][1])
                for output in capture.manifest.outputs
                if places[output.request][0] == self._number
            ]
            self.manifest = msgspec.structs.replace(capture.manifest, outputs=outputs, weights=None)

    @property
    def label(self) -> str:
        """NAME/NNNN and the phase."""
        return f"{self._whole.label} {self.phase}"

    def check(self, *, payload: bool = True) -> None:
        """Check the whole capture; see `Capture.check`."""
        self._whole.check(payload=payload)

    @property
    def sites(self) -> list[schema.Site]:
        """Sites in execution order."""
        return self._whole.sites

    @cached_property
    def sets(self) -> list[RowSet]:
        """None: a set may hold rows of two phases."""
        return []

    @property
    def site_ranks(self) -> list[int]:
        """The rank that recorded each site."""
        return self._whole.site_ranks

    @property
    def payload(self) -> dict[str, int]:
        """How many rows the whole capture kept, by site."""
        return self._whole.payload

    @cached_property
    def _span(self) -> tuple[int, int]:
        """The rows of the phase in the table of the capture: neighbours, for phases do not overlap."""
        phases = self._whole.table.columns["request"] // self._count
        if np.any(np.diff(phases) < 0):
            raise DamagedCapture(
                f"{self.folder} is damaged: rows of two phases are mixed; make the capture again."
            )
        start, stop = np.searchsorted(phases, [self._number, self._number + 1])
        return int(start), int(stop)

    @cached_property
    def table(self) -> Table:
        """The row table of the phase."""
        whole, (start, stop) = self._whole.table, self._span
        columns = {name: column[start:stop] for name, column in whole.columns.items()}
        columns["request"] = columns["request"] - self._number * self._count
        return Table(
            columns,
            whole.prefix[start:stop],
            Window(whole.digest, start, stop),
            Window(whole.present, start, stop),
        )

    @cached_property
    def steps(self) -> list[StepTrace]:
        """The schedule trace of the phase."""
        base = self._number * self._count

        def mine(requests: list[int]) -> list[int]:
            return [number - base for number in requests if 0 <= number - base < self._count]

        return [
            msgspec.structs.replace(
                step,
                requests=mine(step.requests),
                resumed=mine(step.resumed),
                preempted=mine(step.preempted),
                finished=mine(step.finished),
            )
            for step in self._whole.steps
            if step.requests and step.requests[0] // self._count == self._number
        ]

    def row_payload(self, site: str, row: int) -> np.ndarray | None:
        """The stored row of a site; see `Capture.row_payload`."""
        inside = 0 <= row < len(self.table)
        return self._whole.row_payload(site, row + self._span[0]) if inside else None

    def check_row(self, site: str, row: int, found: np.ndarray) -> None:
        """Check a stored row; see `Capture.check_row`."""
        self._whole.check_row(site, row + self._span[0], found)

    def damaged_row(self, site: str, row: int) -> DamagedCapture:
        """What is said of a stored row that does not have its digest."""
        return self._whole.damaged_row(site, row + self._span[0])
