"""Synthetic captures of interventions: the toy's workload in phases, of which one or more are changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from builders import Plan, attention, bump, write

from localizer.store.interventions import Changed, Course, Intervention, Patch, PhaseFacts
from localizer.store.reader import Capture
from localizer.store.schema import Weights
from localizer.wire.phases import ATTENTION_BACKEND, CHANGED, PATCH, PREFIX_CACHE, phase_names

TARGET = "vllm.model_executor.models.llama:LlamaMLP.forward"
BASE = Plan(name="swap", matrix=(1, 2), repeats=1, model_files={"model.safetensors": "cd34"})
"""One phase: the rounds 0 and 1, 3 requests."""

WEIGHTS = Weights(algorithm="blake2b", digest="ab", tensors={"lm_head.weight": "ab"})
QUERY = attention(1, "query")
RAN = Changed(target=TARGET, in_steps=24, outside=1, restored=True)
FILE = Patch(target=TARGET, path="/work/change.py", name="scaled", xxh3_128="ab12")


def phased(kind: str = PATCH, *changes: Changed, reset: bool | None = True, **plan: Any) -> Plan:
    """The plan of a capture in phases; `plan` are fields of `Plan`, its rounds those of all phases."""
    asked = Intervention(
        kind=kind,  # type: ignore[arg-type]
        phases=phase_names(kind),
        repeats=BASE.repeats,
        patches=[FILE] if kind == PATCH else [],
        everywhere=any(change.rebound for change in changes),
    )
    resets = [CHANGED] if kind == PREFIX_CACHE else asked.phases
    facts = [
        PhaseFacts(name=name, reset=reset, tries=1 if reset else 20)
        if name in resets
        else PhaseFacts(name=name, reset=None, tries=0)
        for name in asked.phases
    ]
    course = Course(phases=facts, workers=[list(changes)] if changes else [])
    return replace(
        BASE,
        repeats=len(asked.phases) * BASE.repeats,
        intervention=asked,
        **{"manifested": {"intervention": course, "weights": WEIGHTS}, **plan},
    )


CASES: Mapping[str, Plan] = {
    "diverged": phased(
        PATCH, RAN, changes={("r03.01", 4, QUERY): bump()}, running={"compilation_mode": "NONE"}
    ),
    "no-op": phased(PATCH, RAN),
    "not-back": phased(PATCH, RAN, changes={(f"{name}.01", 4, QUERY): bump() for name in ("r03", "r05")}),
    "never-ran": phased(
        PATCH,
        Changed(target=TARGET, in_steps=0, outside=0, elsewhere=["vllm.other:forward"], restored=False),
        reset=False,
        changes={("r03.01", 4, QUERY): bump()},
    ),
    "compiled": phased(
        PATCH,
        Changed(target=TARGET, in_steps=0, outside=0, restored=True),
        running={"compilation_mode": "DYNAMO_TRACE_ONCE"},
    ),
    "outside": phased(PATCH, Changed(target=TARGET, in_steps=0, outside=3, restored=True)),
    "everywhere": phased(
        PATCH, Changed(target=TARGET, in_steps=9, outside=0, elsewhere=["a:b"], rebound=True, restored=True)
    ),
    "prefix-cache": phased(PREFIX_CACHE, cached={"r02.00": 2, "r03.00": 2, "r05.00": 2, "r06.00": 2}),
    "cold": phased(PREFIX_CACHE, cached={"r04.00": 1, "r06.00": 2}),
    "attention-backend": phased(
        ATTENTION_BACKEND,
        Changed(
            target="attention metadata builders", in_steps=8, outside=0, restored=True, detail="1 in 1 groups"
        ),
    ),
    "killed": phased(PATCH, RAN, manifest=False),
    "hostile": phased(
        PATCH, Changed(target="\x1b[2J:f", in_steps=0, outside=0, elsewhere=["\u202e\nx"] * 7, restored=True)
    ),
}
"""By name: each phase has two rounds, so A1 has the rounds 0-1, B 2-3, A2 4-5."""


def taken(name: str, root: Path) -> Capture:
    """Write the capture of a case under `root`."""
    return Capture(write(root, CASES[name]))
