"""Taps on `compute_logits`: the rows that feed it and the logits it returns, before anything changes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from localizer.hooks.ingraph import Group
from localizer.hooks.raw import raw_bytes
from localizer.hooks.recorder import Recorder
from localizer.hooks.replace import replace


def tap_logits(
    recorder: Recorder,
    undo: ExitStack,
    model: Any,
    sites: tuple[str, str],
    rows: Callable[[str, torch.Tensor], None],
    wanted: Callable[[], bool],
    group: Group | None = None,
) -> None:
    """Record hidden states and logits at `sites` through `rows` while `wanted()` holds.

    Where they are computed inside of full graphs, as those of a draft may be, `group` has the taps there.

    Of each round the first batch is kept, and the last one kept is computed again when the run is over: what
    was recorded as hidden states must give what was recorded as logits.
    """
    compute = model.compute_logits
    record = recorder.guarded(rows)
    kept: dict[str, Any] = {"round": -1}

    def inside(site: str) -> Callable[..., None] | None:
        if group is None:
            return None
        return recorder.guarded(group.tap([site], lambda tensor: record(site, tensor)).see)

    enters, leaves = inside(sites[0]), inside(sites[1])

    @recorder.guarded
    def keep(hidden_states: torch.Tensor) -> None:
        kept.update(round=recorder.rounds, hidden=hidden_states.clone(), logits=None)

    def again() -> str | None:
        if "hidden" not in kept:
            return None
        with torch.inference_mode():
            logits = compute(kept["hidden"])  # also where another worker gathers them: all compute together
        if kept["logits"] is not None and raw_bytes(logits) != raw_bytes(kept["logits"]):
            return f"the logits at {sites[1]} do not come again from the hidden states at {sites[0]}"
        return None

    def watched(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The call outside of recorded steps."""
        if enters is None or leaves is None:
            return compute(hidden_states, *args, **kwargs)
        enters(hidden_states)
        logits = compute(hidden_states, *args, **kwargs)
        leaves(logits)
        return logits

    @functools.wraps(compute)
    def tapped(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not wanted():
            return watched(hidden_states, *args, **kwargs)
        record(sites[0], hidden_states)
        first = kept["round"] != recorder.rounds and not args and not kwargs
        if first:
            keep(hidden_states)
        logits = compute(hidden_states, *args, **kwargs)
        if logits is not None:
            record(sites[1], logits)
            if first:
                kept["logits"] = logits.clone()
        return logits

    recorder.checks.append(again)
    replace(undo, model, "compute_logits", tapped)
