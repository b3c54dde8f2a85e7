"""Which captures a run makes, in which order, and what each of them is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localizer.capture.request import CaptureRequest
from localizer.diff.result import CANDIDATE, PARENT
from localizer.diff.runs import Way
from localizer.run.config import OWN, Config

UNTAPPED, WITNESS = "untapped", "witness"
BLOCKS = "num_gpu_blocks_override"
"""vLLM's argument that sets the number of KV cache blocks."""


@dataclass(frozen=True)
class Step:
    """One capture of a run; each is a process of its own.

    Attributes:
        name: of the capture.
        side: "candidate" or "parent".
        arm: steps of an arm share a compile cache.
        taps: whether anything but what is returned is recorded.
        ways: rows whose payload is kept at all sites; empty in the first pass.
    """

    name: str
    side: str
    arm: str
    taps: bool = True
    ways: tuple[Way, ...] = ()


def first_pass(config: Config) -> list[Step]:
    """The captures before the witness: without taps, then the parent and its controls, then the candidate."""
    passes = config.run
    steps = [
        Step(_again(f"{side}-{UNTAPPED}", number), side, side, taps=False)
        for side in (PARENT, CANDIDATE)
        for number in range(1, passes.untapped + 1)
    ]
    steps += [
        Step(_again(PARENT, number), PARENT, _again(PARENT, number))
        for number in range(1, passes.controls + 2)
    ]
    repeats = range(1, passes.repeats + 2)
    return steps + [Step(_again(CANDIDATE, number), CANDIDATE, CANDIDATE) for number in repeats]


def witness_pass(number: int, ways: tuple[Way, ...]) -> list[Step]:
    """The captures of one try of the witness pass, from 1."""
    return [Step(_again(f"{side}-{WITNESS}", number), side, side, ways=ways) for side in (PARENT, CANDIDATE)]


def _again(name: str, number: int) -> str:
    """`parent`, `parent-2`, `parent-3`, ..."""
    return name if number == 1 else f"{name}-{number}"


def settings(config: Config, side: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Engine arguments and environment of a side."""
    source = config.candidate if side == CANDIDATE else config.parent
    return config.engine | source.engine, config.environment | source.environment


def request(
    config: Config, step: Step, root: Path, base: Path, caches: Path, pinned: int | None = None
) -> CaptureRequest:
    """What a step asks for.

    Args:
        config: of the run.
        step: the step.
        root: folder of the captures.
        base: folder to which the configuration's paths are relative.
        caches: folder for compiled code.
        pinned: number of KV cache blocks, where the sources do not agree on it by themselves.
    """
    source = config.candidate if step.side == CANDIDATE else config.parent
    engine, environment = settings(config, step.side)
    if pinned is not None:
        engine = engine | {BLOCKS: pinned}
    work, chosen = config.workload, config.selection
    own = config.run.compile_cache == OWN and not engine.get("enforce_eager")
    given: Mapping[str, Any] = {"python": path_of(base, source.python)} if source.python else {}
    return CaptureRequest(
        name=step.name,
        root=root,
        model=_model(base, work.model),
        overlay=base / source.overlay if source.overlay else None,
        git=revision_of(base, source.git),
        probes=source.probes if step.taps else [],
        matrix=",".join(map(str, work.matrix)),
        repeats=work.repeats,
        prompt_tokens=work.prompt_tokens,
        max_tokens=work.max_tokens,
        seed=work.seed,
        layers="all" if step.ways else chosen.layers,
        level=chosen.level,
        payload="all" if step.ways else chosen.payload,
        sites=[] if step.ways else chosen.sites,
        rows=[f"{way.request}:0-{way.position}" for way in step.ways],
        engine=engine,
        speculative_model=_model(base, work.speculative_model) if work.speculative_model else "",
        speculative=work.speculative,
        environment=environment,
        taps=step.taps,
        weights=chosen.weights,
        kv_contents=chosen.kv_contents,
        row_digest=chosen.row_digest,
        graph_rows=chosen.graph_rows or None,
        graph_memory=chosen.graph_memory or None,
        logprobs=config.run.logprobs or None,
        compile_cache=caches / step.arm if own else None,
        unchanged=True,
        **given,
    )


def _model(base: Path, name: str) -> str:
    """A model's folder where there is one below the configuration's, else its name."""
    return str(base / name) if (base / name).is_dir() else name


def revision_of(base: Path, text: str) -> str:
    """`REPO@REV` with REPO relative to the configuration's folder; empty for none."""
    repository, at, revision = text.rpartition("@")
    return f"{base / repository}@{revision}" if at else text


def path_of(base: Path, python: str) -> str:
    """An interpreter: a path is relative to the configuration's folder, a bare name is looked up on PATH."""
    return str(base / python) if "/" in python else python
