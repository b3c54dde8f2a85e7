"""What is always counted in real steps: attention metadata builds, and forwards by their graph mode.

Seen on vLLM 0.32.0 and in the sources of 0.26.0 (`GPUModelRunner` V1): `runner.attn_groups` is a list, by KV
cache group, of lists of `AttentionGroup`, whose `metadata_builders` build for the target's forward; a drafter
that is a model has groups of its own in `draft_attn_groups`. They are made anew while the engine starts. Any
forward, of the target and of the draft, runs inside `vllm.forward_context.set_forward_context`, which enters
`override_forward_context` by its global name; `cudagraph_runtime_mode` says which graph is replayed, if any.
Model Runner V2 replays full graphs without a context (0.26.0, 0.32.0), so its adapter counts them; the groups
of its draft are in `runner.speculator.attn_groups` (0.26.0, 0.32.0).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from localizer.hooks.guard import Guard
from localizer.hooks.recorder import Recorder
from localizer.hooks.replace import replace

TARGET, DRAFT = "target", "draft"

_BUILDS = ("build", "build_for_drafting")
_OURS = "_localizer_counts"


class Counts:
    """Counts metadata builds and forwards of the target and of the draft; a fault ends it, with a note.

    Attributes:
        found: by name, such as `target_metadata_builds` or `draft_forwards_piecewise`.
    """

    def __init__(self, recorder: Recorder, runner: Any) -> None:
        self._recorder, self._runner = recorder, runner
        self._building = False
        self.found: Counter[str] = Counter(
            {f"{model}_metadata_builds": 0 for model in (TARGET, *([DRAFT] if drafts(runner) else []))}
        )
        self.guarded = Guard("the counts of metadata builds and forwards ended", recorder.errors)

    def totals(self) -> dict[str, int]:
        """What was counted, with the replays of full graphs of which the recorder alone was told."""
        full = {f"{model}_forwards_full": count for model, count in self._recorder.replays.items()}
        return dict(self.found) | {name: max(count, self.found[name]) for name, count in full.items()}

    @property
    def model(self) -> str:
        """Which model a real step is busy with now; empty outside of such steps."""
        if self._recorder.in_forward:
            return TARGET
        return DRAFT if self._recorder.recording else ""

    def follow(self, undo: ExitStack) -> None:
        """Count forwards, until `undo` is closed."""
        from vllm import forward_context

        enter = forward_context.override_forward_context
        note = self.guarded(self._forward)

        @functools.wraps(enter)
        def override_forward_context(context: Any) -> Any:
            note(context)
            return enter(context)

        replace(undo, forward_context, "override_forward_context", override_forward_context)

    def follow_builders(self, undo: ExitStack) -> None:
        """Count the builds of the runner's builders as they are now, until `undo` is closed."""
        for builder in builders(groups(self._runner)):
            if not hasattr(builder, _OURS):
                setattr(builder, _OURS, True)
                for name in _BUILDS:
                    if hasattr(builder, name):
                        self._wrap(undo, builder, name)

    def _forward(self, context: Any) -> None:
        model = self.model
        if model and context is not None:
            mode = context.cudagraph_runtime_mode
            self.found[f"{model}_forwards_{getattr(mode, 'name', str(mode)).lower()}"] += 1

    def _wrap(self, undo: ExitStack, builder: Any, name: str) -> None:
        call = getattr(builder, name)

        @functools.wraps(call)
        def build(*args: Any, **kwargs: Any) -> Any:
            outer = not self._building  # building for a draft may build as for the target
            if outer and self.model:
                self.found[f"{self.model}_metadata_builds"] += 1
            self._building = True
            try:
                return call(*args, **kwargs)
            finally:
                self._building = not outer

        replace(undo, builder, name, build)


def drafts(runner: Any) -> bool:
    """Whether a drafter of the runner builds metadata."""
    return hasattr(getattr(runner, "drafter", None), "draft_attn_groups") or hasattr(
        getattr(runner, "speculator", None), "attn_groups"
    )


def groups(runner: Any) -> list[Any]:
    """All groups of layers that share builders: the target's, then the draft's."""
    speculators = getattr(getattr(runner, "speculator", None), "attn_groups", None)
    several = [*getattr(runner, "attn_groups", ()), *(speculators or ())]
    found = [group for groups in several if isinstance(groups, list) for group in groups]
    return [*found, *getattr(getattr(runner, "drafter", None), "draft_attn_groups", ())]


def builders(found: Iterable[Any]) -> list[Any]:
    """The metadata builders of groups."""
    return [builder for group in found for builder in group.metadata_builders]
