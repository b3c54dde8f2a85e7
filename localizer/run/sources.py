"""The two sources of a run: they are two, they differ in something, and they stay what they are."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from localizer.capture.request import prepare
from localizer.diff.control import ran
from localizer.diff.result import CANDIDATE, PARENT, Difference
from localizer.diff.settings import flat, unequal
from localizer.errors import LocalizerError
from localizer.run import plan
from localizer.run.config import Config
from localizer.run.plan import Step
from localizer.sources import identity, interpreter, revision
from localizer.store.reader import Capture
from localizer.store.schema import Identity, Open, Source


@dataclass(frozen=True)
class Side:
    """One source as it was found before anything ran.

    Attributes:
        opening: what the records of its captures will say.
        installation: what `identity.listing` says of its installed vLLM.
    """

    opening: Open
    installation: str


def check_different(config: Config, base: Path) -> None:
    """Check that candidate and parent are not one source, under whatever names.

    Args:
        config: of the run.
        base: folder to which its paths are relative.

    Raises:
        LocalizerError: they are, or a git revision that is named is not there.
    """
    if _source(config, CANDIDATE, base) == _source(config, PARENT, base):
        raise LocalizerError(
            "Candidate and parent are the same (probes, and other names of the same folder, make no "
            "difference); give one of them an overlay, an interpreter, or engine arguments or environment of "
            "its own."
        )


def _source(config: Config, side: str, base: Path) -> tuple[Any, ...]:
    """What makes a source, with one spelling for each place."""
    source = config.candidate if side == CANDIDATE else config.parent
    engine, environment = plan.settings(config, side)
    python = shutil.which(plan.path_of(base, source.python)) if source.python else sys.executable
    return (
        interpreter.place(python) if python else source.python,
        (base / source.overlay).resolve() if source.overlay else None,
        revision.find(plan.revision_of(base, source.git)).commit if source.git else None,
        engine,
        {**os.environ, **environment},
    )


def look(config: Config, side: str, base: Path) -> Side:
    """Find out what a source is before anything runs.

    Raises:
        LocalizerError: it cannot be used.
    """
    prepared = prepare(plan.request(config, Step(side, side, side), Path(), base, Path()))
    if prepared.laid is not None:
        prepared.laid.lock.close()
    installed = Path(prepared.opening.source.vllm_location)
    return Side(prepared.opening, identity.listing(installed))


def key(config: Config, sides: dict[str, Side]) -> str:
    """A digest of what a run is made of: an interrupted one resumes only if that is the same."""
    parts = []
    for side in sides.values():
        it = side.opening
        machine = {name: value for name, value in it.host.items() if name != "name"}
        work = it.workload.model, it.workload.draft
        made = config, what_runs(it.source), *work, it.environment, machine, it.localizer, side.installation
        parts.append(msgspec.json.encode(made))
    return xxhash.xxh3_64_hexdigest(b"\0".join(parts))


def what_runs(source: Source) -> Source:
    """A source without what git says of native code, which is not rebuilt: that may change without effect."""
    if source.overlay is None:
        return source
    return msgspec.structs.replace(source, overlay=msgspec.structs.replace(source.overlay, native=None))


def differences(candidate: Open, parent: Open) -> list[Difference]:
    """What differs between the two sources as far as it is known before they run."""
    ours, theirs = (
        flat({"source": msgspec.to_builtins(it.source), "engine": it.workload.engine,
              "environment": it.environment})
        for it in (candidate, parent)
    )  # fmt: skip
    return unequal(*({name: it for name, it in table.items() if it is not None} for table in (ours, theirs)))


def check_unchanged(side: Side, name: str, held: dict[str, Any], capture: Capture) -> None:
    """Check that a capture is of the source as it was found, which is still that.

    Args:
        side: the source.
        name: "candidate" or "parent".
        held: what earlier captures of it say of that which really ran; what this one adds is put in.
        capture: the capture.

    Raises:
        LocalizerError: the source has changed while the run went on.
    """
    opening = side.opening
    same = what_runs(capture.open.source) == what_runs(opening.source)
    same &= capture.open.workload.model == opening.workload.model
    same &= capture.open.workload.draft == opening.workload.draft
    same &= identity.listing(Path(opening.source.vllm_location)) == side.installation
    told = capture.manifest.identity if capture.manifest is not None else None
    here = {} if told is None else _held(told)
    if not same or any(held.get(item, value) != value for item, value in here.items()):
        raise LocalizerError(
            f"The {name}'s source, or the machine, is not in {capture.label} what it was when the run began; "
            "leave it alone and start again with --fresh."
        )
    held.update(here)


def _held(told: Identity) -> dict[str, Any]:
    """What of that which really ran stays the same in all runs of a source; workers, whom only runs with taps
    ask, tell of processor and GPUs.
    """
    found = ran(told)
    if told.processor is not None:
        found["identity.processor"] = told.processor.model, told.processor.flags
    return {name: value for name, value in found.items() if name.startswith(HELD) and value}


HELD = ("identity.native.", "identity.processor", "identity.gpus")
