"""`localize run`: the captures of a run one after the other, the diffs, and the one answer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from localizer.cache import cache_folder
from localizer.capture.request import CaptureRequest, prepare
from localizer.capture.session import Progress
from localizer.diff import steady, verdict, witness
from localizer.diff.parity import parity
from localizer.diff.pipeline import diff
from localizer.diff.result import CANDIDATE, DIVERGED, PARENT, Difference, Result
from localizer.diff.runs import (
    SAME,
    CompiledCode,
    Probed,
    RunResult,
    RunStep,
    Witness,
    WitnessTry,
)
from localizer.diff.settings import flat, unequal
from localizer.errors import LocalizerError
from localizer.run import plan
from localizer.run.config import NONE, SHARED, Config
from localizer.run.plan import Step
from localizer.store import schema
from localizer.store.reader import Capture
from localizer.store.runs import Done, RunFolder, digest


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
    """One run.

    Args:
        config: what to do.
        root: folder of the captures.
        base: folder to which the configuration's paths are relative.
        watcher: whoever is told.
        capturing: makes a capture.
        fresh: begin anew even where an interrupted run could be resumed.
    """

    def __init__(
        self, config: Config, root: Path, base: Path, watcher: Watcher, capturing: Capturing, fresh: bool
    ) -> None:
        self._config, self._root, self._base, self._watcher = config, root, base, watcher
        self._capturing = capturing
        openings = {side: self._opening(side) for side in (PARENT, CANDIDATE)}
        self._differences = _differences(openings[CANDIDATE], openings[PARENT])
        key = self._key(openings)
        self._caches = cache_folder() / "compile" / key
        record = None if fresh else RunFolder.unfinished(root, key)
        self._resumes = record is not None
        self.record = record or RunFolder.new(root, key, msgspec.to_builtins(config))
        self._made: list[tuple[Step, Capture]] = []
        self._steps: list[RunStep] = []
        self._begun: set[str] = set()
        self._first: dict[str, Capture] = {}
        self._pinned: int | None = None

    def run(self) -> RunResult:
        """Make the captures that are not there yet, and compare them.

        Raises:
            LocalizerError: a source cannot be captured; what was captured is kept, and the run can resume.
        """
        self._watcher.differences(self._differences)
        if self._resumes:
            self._watcher.tell(f"Resuming {self.record.folder}: {len(self.record.done)} captures are there.")
        self._first_pass()
        result = self._conclude()
        shutil.rmtree(self._caches, ignore_errors=True)
        return result

    # -- before anything runs --------------------------------------------------------------------------

    def _opening(self, side: str) -> schema.Open:
        """What the records of a side's captures will say."""
        step = Step(side, side, side)
        prepared = prepare(plan.request(self._config, step, self._root, self._base, Path()))
        if prepared.laid is not None:
            prepared.laid.lock.close()
        return prepared.opening

    def _key(self, openings: dict[str, schema.Open]) -> str:
        """A digest of what the run is made of: an interrupted one resumes only if that is the same."""
        parts = [
            msgspec.json.encode(
                (self._config, it.source, it.workload.model, it.workload.draft, it.environment)
            )
            for it in openings.values()
        ]
        return xxhash.xxh3_64_hexdigest(b"\0".join(parts))

    # -- captures --------------------------------------------------------------------------------------

    def _first_pass(self) -> None:
        """Make the captures of the first pass; with KV blocks pinned, if the sources do not agree on them."""
        steps = plan.first_pass(self._config)
        for number, step in enumerate(steps, 1):
            self._make(step, f"{number} of {len(steps)}")
            blocks = {count for count in self._blocks().values() if count is not None}
            if len(blocks) > 1 and self._pinned is None:
                self._pinned = min(blocks)
                self._watcher.tell(
                    f"The KV caches have {' and '.join(map(str, sorted(blocks)))} blocks: all runs are made "
                    f"with {self._pinned}, from the first on."
                )
                self._made.clear()
                self._steps.clear()
                self._first_pass()
                return

    def _make(self, step: Step, which: str) -> Capture:
        """The capture of a step: made now, or by an earlier try of this run."""
        ways = " ".join(f"{way.request}:{way.position}" for way in step.ways)
        found = self.record.find(step.name, self._pinned, ways)
        if found is not None:
            capture, done = found
        else:
            if step.arm not in self._begun:  # its cache is empty at its first run
                shutil.rmtree(self._caches / step.arm, ignore_errors=True)
            capture, done = self._take(step, which, ways)
        self._begun.add(step.arm)
        self._check(step, capture)
        self._made.append((step, capture))
        self._steps.append(
            RunStep(step=step.name, capture=capture.label, seconds=done.seconds, resumed=found is not None)
        )
        return capture

    def _check(self, step: Step, capture: Capture) -> None:
        """Check that a capture is of the same source as the others of its side.

        Raises:
            LocalizerError: the source has changed while the run went on.
        """
        first = self._first.setdefault(step.side, capture)
        changed = first.open.source != capture.open.source
        ours, theirs = (it.manifest.identity if it.manifest is not None else None for it in (first, capture))
        changed |= ours is not None and theirs is not None and ours.python.changed != theirs.python.changed
        if changed:
            raise LocalizerError(
                f"The {step.side}'s source is not the same in {first.label} and {capture.label}: it changed "
                "during the run; leave it alone and start again with --fresh."
            )

    def _take(self, step: Step, which: str, ways: str) -> tuple[Capture, Done]:
        request = plan.request(self._config, step, self._root, self._base, self._caches, self._pinned)
        started = time.monotonic()
        progress = self._watcher.capture(f"{step.name} ({which})")
        folder = self._capturing(request, progress)
        capture = Capture(folder)
        self._watcher.captured(capture)
        seconds = time.monotonic() - started
        done = Done(
            step=step.name,
            number=capture.open.number,
            seconds=seconds,
            manifest=digest(capture),
            pinned=self._pinned,
            ways=ways,
        )
        if capture.complete:
            self.record.add(done)
        return capture, done

    def _blocks(self) -> dict[str, int | None]:
        """KV cache blocks by capture."""
        found: dict[str, int | None] = {}
        for _, capture in self._made:
            count = capture.manifest.engine.get("num_kv_blocks") if capture.manifest is not None else None
            found[capture.label] = count if isinstance(count, int) else None
        return found

    # -- the answer ------------------------------------------------------------------------------------

    def _conclude(self) -> RunResult:
        """Compare, witness, decide."""
        parent, *controls = self._of(PARENT, taps=True)
        candidate, *again = self._of(CANDIDATE, taps=True)
        fair = [] if self._caching == SHARED else controls
        first_pass = diff(candidate, parent, fair)
        untapped = {side: self._of(side, taps=False) for side in (PARENT, CANDIDATE)}
        tapped = {PARENT: parent, CANDIDATE: candidate}
        steadiness = [
            steady.compare_runs(side, runs[0], other) for side, runs in untapped.items() for other in runs[1:]
        ]
        unsteady = {item.source for item in steadiness if item.differs != SAME}
        observer = [
            steady.compare_runs(side, tapped[side], runs[0])
            for side, runs in untapped.items()
            if runs and side not in unsteady
        ]
        witnessed, found = self._witness(first_pass, candidate, parent, fair)
        plain = [(runs or [tapped[side]])[0] for side, runs in untapped.items()]
        table = parity(plain[1], plain[0], found)
        repeats = [steady.compare_runs(PARENT, control, parent) for control in controls]
        repeats += [steady.compare_runs(CANDIDATE, other, candidate) for other in again]
        decided, reasons = verdict.untrusted(
            first_pass.verdict, first_pass.reasons, table, steadiness, observer, repeats, witnessed
        )
        return RunResult(
            verdict=decided,
            attribution=found.attribution,
            reasons=reasons,
            parity=table,
            untapped=steadiness,
            observer=observer,
            repeats=repeats,
            kv_blocks=self._blocks(),
            pinned=self._pinned,
            compile_cache=self._caching,
            compiled=[_compiled(capture, parent) for capture in (candidate, *controls)],
            probes=[probed for capture in (parent, candidate) for probed in _probes(capture)],
            witness=witnessed,
            first=found.first,
            differences=self._differences,
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
                    difference=witness.shows(result, first_pass),
                )
            )
            if found[-1].reproduced:
                return Witness(ways=list(ways), tries=found), result
        return Witness(ways=list(ways), tries=found), first_pass


def _probes(capture: Capture) -> list[Probed]:
    """What the probes of a capture counted in its steps."""
    found = capture.manifest.probes if capture.manifest is not None else []
    return [Probed(capture=capture.label, probe=probe) for probe in found]


def _compiled(one: Capture, other: Capture) -> CompiledCode:
    """Whether the code generated for two runs is the same."""
    files = [
        capture.manifest.compiled.files
        if capture.manifest is not None and capture.manifest.compiled is not None
        else {}
        for capture in (one, other)
    ]
    equal = files[0] == files[1] if all(files) else None
    return CompiledCode(one=one.label, other=other.label, equal=equal)


def _differences(candidate: schema.Open, parent: schema.Open) -> list[Difference]:
    """What differs between the two sources as far as it is known before they run."""
    ours, theirs = (
        flat({"source": msgspec.to_builtins(it.source), "engine": it.workload.engine,
              "environment": it.environment})
        for it in (candidate, parent)
    )  # fmt: skip
    return unequal(*({name: it for name, it in table.items() if it is not None} for table in (ours, theirs)))
