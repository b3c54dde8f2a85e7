"""`localize run`: the captures of a run one after the other, the diffs, and the one answer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from localizer.capture.request import CaptureRequest, masked
from localizer.capture.session import Progress
from localizer.diff import steady, verdict, witness
from localizer.diff.parity import parity
from localizer.diff.pipeline import diff
from localizer.diff.result import CANDIDATE, DIVERGED, PARENT, Difference, Result
from localizer.diff.runs import RunResult, RunStep, Witness, WitnessTry
from localizer.run import parts, plan, sources
from localizer.run.config import NONE, SHARED, Config
from localizer.run.plan import Step
from localizer.store.reader import Capture
from localizer.store.runs import Done, begin, digest


class Watcher(Protocol):
    """Whoever is told how a run goes on."""

    def tell(self, text: str) -> None:
        """One line about the run."""

    def differences(self, found: Sequence[Difference]) -> None:
        """What differs between the two sources, before anything runs."""

    def capture(self, name: str) -> Progress:
        """The progress of one capture, which begins."""

    def captured(self, capture: Capture) -> None:
        """That capture has ended."""


Capturing = Callable[[CaptureRequest, Progress], Path]
"""`localizer.capture.session.capture`."""


class Pipeline:
    """One run, whose `record` is this process's alone until that is closed.

    Args:
        config: what to do.
        root: folder of the captures.
        base: folder to which the configuration's paths are relative.
        watcher: whoever is told.
        capturing: makes a capture.
        fresh: begin anew even where an interrupted run could be resumed.

    Raises:
        LocalizerError: the sources cannot be used or are one, or another process carries out the same run.
    """

    def __init__(
        self, config: Config, root: Path, base: Path, watcher: Watcher, capturing: Capturing, fresh: bool
    ) -> None:
        self._config, self._root, self._base, self._watcher = config, root, base, watcher
        self._capturing = capturing
        sources.check_different(config, base)
        self._sides = {side: sources.look(config, side, base) for side in (PARENT, CANDIDATE)}
        self._differences = sources.differences(self._sides[CANDIDATE].opening, self._sides[PARENT].opening)
        self._made: list[tuple[Step, Capture]] = []
        self._steps: list[RunStep] = []
        self._begun: set[str] = set()
        self._held: dict[str, dict[str, Any]] = {}
        self._pinned: int | None = None
        self._blocks_before: dict[str, int | None] = {}
        plain = msgspec.to_builtins(config)
        self.record = begin(root, sources.key(config, self._sides), masked(plain), fresh=fresh)

    def run(self) -> RunResult:
        """Make the captures that are not there yet, and compare them.

        Raises:
            LocalizerError: a source cannot be captured; what was captured is kept, and the run can resume.
        """
        self._watcher.differences(self._differences)
        if self.record.resumed:
            self._watcher.tell(f"Resuming {self.record.folder}: {len(self.record.done)} captures are there.")
        self._first_pass()
        result = self._conclude()
        shutil.rmtree(self.record.compiled, ignore_errors=True)
        return result

    # -- captures --------------------------------------------------------------------------------------

    def _first_pass(self) -> None:
        """Make the captures of the first pass; with KV blocks pinned, if the sources do not agree on them."""
        steps = plan.first_pass(self._config)
        for number, step in enumerate(steps, 1):
            self._make(step, f"{number} of {len(steps)}")
            blocks = self._disagreeing()
            if blocks:
                self._pinned, self._blocks_before = min(blocks), self._blocks()
                self._watcher.tell(
                    f"The KV caches have {' and '.join(map(str, sorted(blocks)))} blocks: all runs are made "
                    f"with {self._pinned}, from the first on."
                )
                self._made.clear()
                self._steps.clear()
                self._first_pass()
                return

    def _disagreeing(self) -> set[int]:
        """The numbers of KV blocks, if they are to be made equal, so not where the sources ask for others.

        It waits for the first run of each source, so that both of their numbers are known.
        """
        asked = [plan.settings(self._config, side)[0].get(plan.BLOCKS) for side in (PARENT, CANDIDATE)]
        both = len({step.side for step, _ in self._made}) == 2
        blocks = {count for count in self._blocks().values() if count is not None}
        return blocks if self._pinned is None and both and asked[0] == asked[1] and len(blocks) > 1 else set()

    def _make(self, step: Step, which: str) -> Capture:
        """The capture of a step: made now, or by an earlier try of this run."""
        ways = " ".join(f"{way.request}:{way.position}" for way in step.ways)
        found = self.record.find(step.name, self._pinned, ways)
        if found is not None:
            capture, seconds = found[0], found[1].seconds
            self._check(step, capture)
        else:
            if step.arm not in self._begun:  # its cache is empty at its first run
                shutil.rmtree(self.record.compiled / step.arm, ignore_errors=True)
            capture, seconds = self._take(step, which, ways)
        self._begun.add(step.arm)
        self._made.append((step, capture))
        self._steps.append(
            RunStep(
                step=step.name,
                capture=capture.label,
                seconds=seconds,
                resumed=found is not None,
                state=capture.state,
            )
        )
        return capture

    def _check(self, step: Step, capture: Capture) -> None:
        held = self._held.setdefault(step.side, {})
        sources.check_unchanged(self._sides[step.side], step.side, held, capture)

    def _take(self, step: Step, which: str, ways: str) -> tuple[Capture, float]:
        """Make a capture; and how many seconds it took. What did not finish is made anew another time."""
        request = plan.request(self._config, step, self._root, self._base, self.record.compiled, self._pinned)
        started = time.monotonic()
        progress = self._watcher.capture(f"{step.name} ({which})")
        folder = self._capturing(request, progress)
        capture = Capture(folder)
        self._watcher.captured(capture)
        seconds = time.monotonic() - started
        self._check(step, capture)
        if capture.complete:
            self.record.add(
                Done(
                    step=step.name,
                    number=capture.open.number,
                    seconds=seconds,
                    manifest=digest(capture),
                    pinned=self._pinned,
                    ways=ways,
                )
            )
        return capture, seconds

    def _blocks(self) -> dict[str, int | None]:
        """KV cache blocks by capture."""
        return {capture.label: parts.kv_blocks(capture) for _, capture in self._made}

    # -- the answer ------------------------------------------------------------------------------------

    def _conclude(self) -> RunResult:
        """Compare, witness, decide."""
        parent, *controls = self._of(PARENT, taps=True)
        candidate, *again = self._of(CANDIDATE, taps=True)
        fair = [] if self._caching == SHARED else controls
        first_pass = diff(candidate, parent, fair)
        # what stands for the runs without taps is a complete one, if there is any
        untapped = {
            side: sorted(self._of(side, taps=False), key=lambda run: not run.complete)
            for side in (PARENT, CANDIDATE)
        }
        tapped = {PARENT: parent, CANDIDATE: candidate}
        steadiness = [
            steady.compare_runs(side, runs[0], other) for side, runs in untapped.items() for other in runs[1:]
        ]
        repeats = [steady.compare_runs(PARENT, control, parent) for control in controls]
        repeats += [steady.compare_runs(CANDIDATE, other, candidate) for other in again]
        unsteady = {item.source for item in (*steadiness, *repeats) if item.returned_otherwise}
        observer = [
            steady.compare_runs(side, tapped[side], runs[0])
            for side, runs in untapped.items()
            if runs and side not in unsteady
        ]
        witnessed, found = self._witness(first_pass, candidate, parent, fair)
        plain = [(runs or [tapped[side]])[0] for side, runs in untapped.items()]
        table = parity(plain[1], plain[0], found)
        decided, reasons = verdict.untrusted(
            first_pass.verdict,
            first_pass.reasons,
            table,
            steadiness,
            observer,
            repeats,
            witnessed,
            unpinned=list(parts.unpinned(self._made, self._pinned)),
            unfinished=[it for side, several in untapped.items() for it in parts.unfinished(side, several)],
            unfinished_again=[*parts.unfinished(PARENT, controls), *parts.unfinished(CANDIDATE, again)],
        )
        return RunResult(
            verdict=decided,
            attribution=first_pass.attribution,
            reasons=reasons,
            parity=table,
            untapped=steadiness,
            observer=observer,
            repeats=repeats,
            kv_blocks=self._blocks(),
            kv_blocks_before=self._blocks_before,
            pinned=self._pinned,
            compile_cache=self._caching,
            compiled=[parts.compiled(capture, parent) for capture in (candidate, *controls)],
            probes=[probed for capture in (parent, candidate) for probed in parts.probes(capture)],
            witness=witnessed,
            first=found.first,
            differences=[*parts.own_blocks(self._blocks_before), *self._differences],
            diff=found,
            first_pass=first_pass,
            steps=self._steps,
        )

    @property
    def _caching(self) -> str:
        """How compiled code is kept; "none" where neither side compiles."""
        sides = [plan.settings(self._config, side)[0] for side in (PARENT, CANDIDATE)]
        return (
            NONE if all(engine.get("enforce_eager") for engine in sides) else self._config.run.compile_cache
        )

    def _of(self, side: str, *, taps: bool) -> list[Capture]:
        """Captures of a side in the first pass, in order."""
        return [
            capture
            for step, capture in self._made
            if (step.side, step.taps) == (side, taps) and not step.ways
        ]

    def _witness(
        self, first_pass: Result, candidate: Capture, parent: Capture, controls: list[Capture]
    ) -> tuple[Witness | None, Result]:
        """Capture again, with payload, what leads to the first differences; the diff to localize from."""
        tries = self._config.run.witness_tries
        ways = tuple(witness.ways(first_pass)) if first_pass.verdict == DIVERGED else ()
        if not ways or not tries:
            return None, first_pass
        found: list[WitnessTry] = []
        for number in range(1, tries + 1):
            again = {
                step.side: self._make(step, f"witness, attempt {number}")
                for step in plan.witness_pass(number, ways)
            }
            result = diff(again[CANDIDATE], again[PARENT], controls)
            found.append(
                WitnessTry(
                    candidate=witness.reproduction(again[CANDIDATE], candidate, ways),
                    parent=witness.reproduction(again[PARENT], parent, ways),
                    difference=witness.shows(again[CANDIDATE], again[PARENT], result, first_pass),
                )
            )
            if found[-1].reproduced:
                return Witness(ways=list(ways), tries=found), witness.attributed(result, first_pass)
        return Witness(ways=list(ways), tries=found), first_pass
