"""Phases in one process: as it is, changed, restored; both the program's side and the workers'."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from localizer.hooks.builders import Builders
from localizer.hooks.patches import InStep, Patches
from localizer.wire.phases import (
    AFTER,
    ATTENTION_BACKEND,
    CHANGED,
    PATCH,
    PREFIX_CACHE,
    Intervention,
    phase_names,
)
from localizer.wire.spec import SPEC_VARIABLE, RunSpec

RESET_TRIES, RESET_SECONDS = 20, 0.25
"""How often the prefix cache is asked to be reset while blocks are in use, and the pause between."""

_CHANGE = "_localizer_change"


class Change(Protocol):
    """Something that is changed in one worker and put back."""

    def apply(self) -> None: ...

    def restore(self) -> list[dict[str, Any]]: ...


class Phases:
    """The phases of a run, on the program's side.

    Attributes:
        facts: how they went, with the fields of `localizer.store.interventions.Course`.
    """

    def __init__(self, llm: Any, spec: RunSpec, report: Callable[..., None]) -> None:
        assert spec.intervention is not None
        self._llm, self._rounds, self._report = llm, spec.rounds, report
        self._asked = Intervention(**spec.intervention)
        self.facts: dict[str, Any] = {"phases": [], "workers": []}

    def rounds(self) -> Iterator[tuple[int, list[str]]]:
        """Number and request ids of each round; what lies between phases is done between two of them."""
        names = phase_names(self._asked.kind)
        each = len(self._rounds) // len(names)
        changes = self._asked.kind != PREFIX_CACHE
        if changes:
            self._llm.collective_rpc("localizer_prepare_change")
        for index, name in enumerate(names):
            if changes and name == AFTER:
                self.facts["workers"] = self._llm.collective_rpc("localizer_restore")
            reset, tries = self._reset(name)
            if changes and name == CHANGED:
                self._llm.collective_rpc("localizer_change")
            self.facts["phases"].append({"name": name, "reset": reset, "tries": tries})
            self._report("phase", name=name)
            yield from list(enumerate(self._rounds))[index * each : (index + 1) * each]

    def _reset(self, name: str) -> tuple[bool | None, int]:
        """Empty the prefix cache, if that belongs to a phase: vLLM's answer, and how often it was asked."""
        if self._asked.keep_prefix_cache or (self._asked.kind == PREFIX_CACHE and name != CHANGED):
            return None, 0
        for number in range(1, RESET_TRIES + 1):
            if self._llm.reset_prefix_cache():
                return True, number
            time.sleep(RESET_SECONDS)
        return False, RESET_TRIES


class ChangesWorker:
    """What the worker extension does between phases."""

    def localizer_prepare_change(self) -> None:
        """Find everything that is to be changed, so that a mistake shows before the first phase."""
        spec = RunSpec.read(os.environ[SPEC_VARIABLE])
        assert spec.intervention is not None
        setattr(self, _CHANGE, change(self, Intervention(**spec.intervention), self.localizer_in_step))

    def localizer_in_step(self) -> bool:
        """Whether a recorded step is under way."""
        raise NotImplementedError

    def localizer_change(self) -> None:
        """The changed phase begins."""
        getattr(self, _CHANGE).apply()

    def localizer_restore(self) -> list[dict[str, Any]]:
        """The changed phase is over: what was changed, how often it ran, and whether it was put back."""
        found: list[dict[str, Any]] = getattr(self, _CHANGE).restore()
        return found


def change(worker: Any, asked: Intervention, in_step: InStep) -> Change:
    """What is changed in a worker."""
    if asked.kind == ATTENTION_BACKEND:
        return Builders(worker, in_step)
    assert asked.kind == PATCH
    return Patches(asked.patches, asked.everywhere, in_step, list(_instances(worker)))


def _instances(worker: Any) -> Iterator[Any]:
    """The objects of a worker that may hold bound methods: runners, modules, layers, their impls."""
    runner = worker.model_runner
    drafter = getattr(runner, "drafter", None)
    yield from (it for it in (worker, runner, drafter) if it is not None)
    for model in (getattr(runner, "model", None), getattr(drafter, "model", None)):
        yield from model.modules() if isinstance(model, torch.nn.Module) else ()
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        yield from (it for it in (layer, getattr(layer, "impl", None)) if it is not None)
