"""The phases of an intervention, as the command line, the source and the reports name them."""

from __future__ import annotations

from dataclasses import dataclass, field

PATCH, PREFIX_CACHE, ATTENTION_BACKEND = KINDS = ("patch", "prefix-cache", "attention-backend")
"""What is changed: Python code; what the prefix cache holds; the attention metadata builders."""

WARM_UP, BEFORE, CHANGED, AFTER = "warm-up", "A1", "B", "A2"
"""Names of phases: as it is, changed, restored; and one that only fills the prefix cache."""


def phase_names(kind: str) -> list[str]:
    """The phases of an intervention of a kind, in order."""
    return [*([WARM_UP] if kind == PREFIX_CACHE else []), BEFORE, CHANGED, AFTER]


@dataclass(frozen=True)
class Intervention:
    """What the source changes between phases.

    Attributes:
        kind: one of `KINDS`.
        patches: of the kind "patch": (`module:attr`, path of a file, name of an object in it) each.
        everywhere: whether other names of what is patched are bound to the replacement as well.
        keep_prefix_cache: whether the prefix cache is left as it is between phases.
    """

    kind: str
    patches: list[list[str]] = field(default_factory=list)
    everywhere: bool = False
    keep_prefix_cache: bool = False
