"""The arguments of a call by their names, however they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Take = Callable[[Any, Any], None]
"""Takes the arguments of a call, positional and named."""


def pass_on(names: Sequence[str], order: Sequence[str], action: Callable[..., None]) -> Take:
    """Call `action` with the arguments of these names; `order` are the names of all parameters."""
    if not names:
        return lambda args, kwargs: None
    places = [order.index(name) for name in names]
    first, behind = min(places), max(places) + 1
    together = places == list(range(first, behind))

    def take(args: Any, kwargs: Any) -> None:
        if len(args) <= first:
            action(*map(kwargs.get, names))
        elif together and len(args) >= behind:
            action(*args[first:behind])
        else:
            pairs = zip(places, names, strict=True)
            action(*[args[place] if place < len(args) else kwargs.get(name) for place, name in pairs])

    return take
