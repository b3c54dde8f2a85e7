"""Taps: ops at the host boundary, final hidden states and logits; modules on request.

Python is reached between compiled pieces: there the tensors that an op takes and gives are recorded.
`layout.check` has made sure that everything is as expected, `boundaries` says what is tapped of which layer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from localizer.hooks import drafts, layout, unchanged
from localizer.hooks.arguments import Take, pass_on
from localizer.hooks.boundaries import Boundary, Op, block, boundaries, choose, is_eager
from localizer.hooks.ingraph import Graphs, Group
from localizer.hooks.logits import tap_logits
from localizer.hooks.modules import ModuleTaps
from localizer.hooks.ranks import gathered_elsewhere, naming
from localizer.hooks.recorder import Recorder
from localizer.hooks.replace import replace
from localizer.hooks.runner_v1 import raw_model
from localizer.wire import ranks
from localizer.wire.spec import (
    ALL_ROWS,
    AUXILIARY,
    BOUNDARY,
    DRAFT,
    DRAFT_LOGIT_ROWS,
    DRAFT_ROWS,
    HIDDEN,
    INPUT_IDS,
    LOGIT_ROWS,
    LOGITS,
    MODULE,
    POSITIONS,
    TOKEN,
    TOKEN_ROWS,
)


def install(
    recorder: Recorder,
    runner: Any,
    vllm_config: Any,
    selection: str,
    patterns: Sequence[str] = ("*",),
    level: str = BOUNDARY,
    graphs: Graphs | None = None,
    digest_split: int = 1,
) -> ExitStack:
    """Tap inputs, layers with a boundary, final hidden states and logits, of the target and of its draft.

    The selection is of the target's layers that mix tokens, each with the experts and modules of its decoder
    layer; a draft's are all tapped. Only sites that match one of the shell patterns are recorded. `graphs`
    are told what passes outside of recorded steps, so that they can tap full CUDA graphs. With `digest_split`
    heads are recorded in the ranges that so many workers would hold.
    Closing what is returned takes all taps away.

    Raises:
        layout.CannotTap: the selection names no layer of this model, no pattern matches, modules are to be
            tapped of a model that is compiled, or heads cannot be split.
    """
    if level == MODULE and not is_eager(vllm_config):
        raise layout.CannotTap(
            "modules can be tapped only without compilation: set --engine enforce_eager=true"
        )
    undo = ExitStack()
    model = raw_model(runner.model)
    found, untapped = boundaries(vllm_config, model)
    try:
        chosen = {boundary.name for boundary in choose(found, selection)}
    except ValueError as error:
        raise layout.CannotTap(f"--layers {selection}: {error}") from None
    homes = {block(name) for name in chosen}
    everything = all(boundary.name in chosen for boundary in found if boundary.mixes)

    def wanted_layer(home: str) -> bool:
        return not home or home in homes or everything

    tapped = [
        boundary
        for boundary in found
        if (boundary.name in chosen if boundary.mixes else wanted_layer(block(boundary.name)))
    ]
    auxiliary = [f"{AUXILIARY}/{index}" for index in range(auxiliary_count(runner))]
    sites = [(INPUT_IDS, ALL_ROWS), (POSITIONS, ALL_ROWS)]
    sites += [(name, ALL_ROWS) for name in [*_names(tapped, ""), *auxiliary]]
    sites += [(HIDDEN, LOGIT_ROWS), (LOGITS, LOGIT_ROWS), (TOKEN, TOKEN_ROWS)]
    absent = _absent(tapped, "")
    draft = drafts.draft_model(runner)
    draft_found: list[Boundary] = []
    if draft is not None:
        draft_found, unknown = boundaries(vllm_config, draft)
        untapped |= {DRAFT + name: kind for name, kind in unknown.items()}
    drafting = any(boundary.mixes for boundary in draft_found)
    reason = drafts.unknown(runner)
    if drafting and reason:
        untapped |= {DRAFT + boundary.name: reason for boundary in draft_found}
        drafting = False
    if drafting:
        absent |= _absent(draft_found, DRAFT)
        names = [DRAFT + INPUT_IDS, DRAFT + POSITIONS, *_names(draft_found, DRAFT)]
        sites += [(name, DRAFT_ROWS) for name in names]
        sites += [(DRAFT + HIDDEN, DRAFT_LOGIT_ROWS), (DRAFT + LOGITS, DRAFT_LOGIT_ROWS)]

    recorder.naming = naming(vllm_config, tapped, draft_found if drafting else (), digest_split)
    elsewhere = gathered_elsewhere(model, recorder.naming)
    absent |= elsewhere

    def matches(name: str) -> bool:
        return any(ranks.matches(recorder.naming(name), pattern) for pattern in patterns)

    sites = [(name, rows) for name, rows in sites if matches(name) and name not in elsewhere]
    if not sites and level != MODULE:
        raise layout.CannotTap(f"no site matches --sites {' or '.join(patterns)}")
    recorder.register(sites, absent, untapped)

    def in_target() -> bool:
        return recorder.recording and recorder.in_forward

    _tap_layers(undo, tapped, recorder, False, None if graphs is None else graphs.target)
    if drafting:
        _tap_layers(undo, draft_found, recorder, True, None if graphs is None else graphs.draft)
    tap_logits(recorder, undo, model, (HIDDEN, LOGITS), recorder.logit_rows, in_target)
    if drafting:
        layer = next(layer.name for layer in draft_found if layer.mixes)
        drafts.follow(recorder, undo, runner, layer, graphs)
    if level == MODULE:
        ModuleTaps(
            recorder, model, found, wanted_layer, "", ALL_ROWS,
            in_target, lambda: recorder.batch, recorder.rows, matches,
        ).install(undo)  # fmt: skip
        if drafting and draft is not None:
            ModuleTaps(
                recorder, draft, draft_found, lambda home: True, DRAFT, DRAFT_ROWS,
                lambda: recorder.drafting, lambda: recorder.draft_batch, recorder.draft_rows, matches,
            ).install(undo)  # fmt: skip
    return undo


def auxiliary_count(runner: Any) -> int:
    """How many auxiliary hidden states the target's forward returns for an EAGLE3 draft."""
    if not getattr(runner, "use_aux_hidden_state_outputs", False):
        return 0
    model = raw_model(runner.model)
    holder = getattr(model, "model", model)
    return len(getattr(holder, "aux_hidden_state_layers", ()))


def _names(layers: Sequence[Boundary], prefix: str) -> list[str]:
    """Sites of layers with a boundary, in execution order."""
    return [f"{prefix}{layer.name}/{part}" for layer in layers for part in layer.parts]


def _absent(layers: Sequence[Boundary], prefix: str) -> dict[str, str]:
    """Sites that layers do not have, with the reason."""
    return {f"{prefix}{layer.name}/{part}": why for layer in layers for part, why in layer.absent.items()}


def _tap_layers(
    undo: ExitStack, layers: Sequence[Boundary], recorder: Recorder, draft: bool, group: Group | None
) -> None:
    """Record what the ops of layers, of the target or of the draft, take and give in its steps."""
    for layer in layers:
        for op in layer.ops:
            _tap_op(undo, op, (DRAFT if draft else "") + layer.name, recorder, draft, group)


def _tap_op(undo: ExitStack, op: Op, name: str, recorder: Recorder, draft: bool, group: Group | None) -> None:
    call = getattr(op.owner, op.method)
    order = list(inspect.signature(call).parameters)
    if group is not None and op.reads:
        call = unchanged.checked(call, [parameter for parameter, _ in op.before], name, recorder, group)
    rows = recorder.draft_rows if draft else recorder.rows

    def reading(which: Sequence[tuple[str, str]], record: Callable[..., None]) -> Take:
        return pass_on([parameter for parameter, _ in which], order, record)

    def recorded(which: Sequence[tuple[str, str]]) -> Take:
        return reading(which, recorder.tap([f"{name}/{part}" for _, part in which], draft))

    def seen(which: Sequence[tuple[str, str]]) -> Take | None:
        if group is None or not which:
            return None
        return reading(which, recorder.guarded(group.tap([f"{name}/{part}" for _, part in which]).see))

    before, after = recorded(op.before), recorded(op.after)
    # inside a graph one copy costs less than two
    early, late = ((), op.before) if op.reads else (op.before, ())
    enters, leaves = seen(early), seen((*late, *op.after))
    returned = [f"{name}/{part}" for part in op.returned]

    @recorder.guarded
    def give(result: Any) -> None:
        values = result if isinstance(result, tuple) else (result,)
        for site, tensor in zip(returned[-len(values) :], values, strict=False):
            if isinstance(tensor, torch.Tensor):
                rows(site, tensor)

    def watched(*args: Any, **kwargs: Any) -> Any:
        """The call outside of recorded steps."""
        if enters is not None:
            enters(args, kwargs)
        result = call(*args, **kwargs)
        if leaves is not None:
            leaves(args, kwargs)
        return result

    @functools.wraps(call)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        if not (recorder.drafting if draft else recorder.recording):
            return watched(*args, **kwargs)
        before(args, kwargs)
        result = call(*args, **kwargs)
        after(args, kwargs)
        if returned:
            give(result)
        return result

    replace(undo, op.owner, op.method, tapped)
