"""Standing in for attributes, so that everything can be put back as it was."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


def replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of the instance `owner`; closing `undo` restores what was there, or removes it."""
    before = vars(owner)
    if name in before:
        undo.callback(setattr, owner, name, before[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)
