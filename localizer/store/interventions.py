"""Records of an intervention: what was to be changed between the phases of a capture, and how they went."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from localizer.store.types import Count, Few, Positive, Texts

MOST_PHASES = 16

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=40)]


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """A replacement: `target` (`module:attr`) by the object `name` of the file at `path`, of that digest."""

    target: str
    path: str
    name: str
    xxh3_128: str


class Intervention(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be changed between phases, of which each does the whole workload.

    Attributes:
        kind: one of `localizer.wire.phases.KINDS`.
        phases: their names, in order; phase k has the passes k * `repeats` to (k + 1) * `repeats` - 1.
        repeats: passes over the matrix in one phase.
        patches: of the kind "patch".
        everywhere: whether other names of what is patched are bound to the replacement as well.
        keep_prefix_cache: whether the prefix cache is left as it is between phases.
    """

    kind: Literal["patch", "prefix-cache", "attention-backend"]
    phases: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=MOST_PHASES)]
    repeats: Positive
    patches: Annotated[list[Patch], Few] = []
    everywhere: bool = False
    keep_prefix_cache: bool = False

    def __post_init__(self) -> None:
        if len(set(self.phases)) != len(self.phases) or not all(name.isprintable() for name in self.phases):
            raise ValueError("its phases have no names of their own")


class PhaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A phase that was done.

    `reset` is what vLLM answered when the prefix cache was reset before it, after `tries` requests; None
    where that was not asked for.
    """

    name: str
    reset: bool | None
    tries: Count


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was changed in one worker.

    Attributes:
        target: what; of a patch `module:attr`.
        in_steps, outside: calls in the changed phase, within recorded steps and outside.
        elsewhere: other places at which the original was bound.
        rebound: whether these were changed as well.
        restored: whether the very original object was there again before the next phase, at each place.
        detail: more about it, in words.
    """

    target: str
    in_steps: Count
    outside: Count
    elsewhere: Texts = []
    rebound: bool = False
    restored: bool
    detail: str = ""


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """How the phases went; `workers[w]` is what was changed in worker w."""

    phases: Annotated[list[PhaseFacts], Few]
    workers: Annotated[list[Annotated[list[Changed], Few]], Few] = []
