"""Whether an op leaves its inputs as they are, so that inside a full graph they may be copied after it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from localizer.hooks.arguments import pass_on
from localizer.hooks.ingraph import Group
from localizer.hooks.recorder import Recorder

MOST_ROWS = 64
"""So many rows are compared."""


def checked(
    call: Callable[..., Any], parameters: Sequence[str], name: str, recorder: Recorder, group: Group
) -> Any:
    """A stand-in for a call which compares inputs before and after it.

    It does so in every warm-up of a graph, and the first time in a recorded step that Python reaches. Nothing
    is waited for: that they differ is found out when the run is over, and makes the capture incomplete.

    Args:
        call: the op.
        parameters: names of the tensors [rows, ...] that it should only read.
        name: of the layer, for the sentence.
        recorder: says whether a step is recorded, and asks when the run is over.
        group: says whether a graph is about to be captured.
    """
    order = list(inspect.signature(call).parameters)
    old: list[torch.Tensor] = []
    changed: torch.Tensor | None = None
    seen = False

    def rows(given: Sequence[Any]) -> list[torch.Tensor]:
        return [raw(tensor) for tensor in given if isinstance(tensor, torch.Tensor)]

    @recorder.guarded
    def kept(*given: Any) -> None:
        old.extend(rows(given))

    @recorder.guarded
    def compared(*given: Any) -> None:
        nonlocal changed
        for one, other in zip(old, rows(given), strict=True):
            change = (one != other).any()
            changed = change if changed is None else changed | change
        old.clear()

    keep, compare = (pass_on(parameters, order, action) for action in (kept, compared))

    def complaint() -> str | None:
        if changed is not None and bool(changed):
            return f"{name} writes to its own inputs, so that rows from full graphs hold what it left of them"
        return None

    @functools.wraps(call)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if seen if recorder.recording else not group.warming:
            return call(*args, **kwargs)
        seen = seen or recorder.recording
        keep(args, kwargs)
        result = call(*args, **kwargs)
        compare(args, kwargs)
        return result

    recorder.checks.append(complaint)
    return stand_in


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the first rows as bytes, uint8 [bytes]."""
    rows = tensor[:MOST_ROWS]
    copied = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device).copy_(rows)
    return copied.flatten().view(torch.uint8)
