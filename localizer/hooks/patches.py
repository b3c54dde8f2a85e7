"""Patches: functions of the source replaced by a person's, counted, and put back as they were."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from localizer.hooks.layout import CannotTap
from localizer.hooks.places import Place, elsewhere, resolve, wrapped

ORIGINAL = "original"
"""A replacement whose first parameter has this name is given the original function there."""

InStep = Callable[[], bool]
"""Says whether a recorded step is under way."""


class Calls:
    """How often something was called, within recorded steps and outside."""

    def __init__(self, in_step: InStep) -> None:
        self._in_step = in_step
        self.in_steps = self.outside = 0

    def counting(self, function: Callable[..., Any], like: Any) -> Callable[..., Any]:
        """`function`, counted, with the name and signature of `like`."""

        @functools.wraps(like)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._in_step():
                self.in_steps += 1
            else:
                self.outside += 1
            return function(*args, **kwargs)

        return counted


class Patches:
    """Replacements of one worker, found and loaded at once, in place between `apply` and `restore`.

    Args:
        patches: (`module:attr`, path of a file, name of an object in it) each.
        everywhere: whether other places that hold the original are changed as well.
        in_step: says whether a recorded step is under way.
        instances: objects that may hold what is patched as bound methods; where localizer's own taps do, the
            replacement is put behind the tap.

    Raises:
        CannotTap: a target or a replacement is not there or cannot be called.
    """

    def __init__(
        self,
        patches: Sequence[Sequence[str]],
        everywhere: bool,
        in_step: InStep,
        instances: Sequence[Any] = (),
    ) -> None:
        files: dict[str, ModuleType] = {}
        self._places = [resolve(target) for target, _, _ in patches]
        self._with = [_replacement(files, *patch) for patch in patches]
        self._loaded = [module.__name__ for module in files.values()]
        self._calls = [Calls(in_step) for _ in patches]
        self._everywhere, self._instances = everywhere, instances
        self._others: list[list[Place]] = [[] for _ in patches]
        self._bound: list[list[Place]] = [[] for _ in patches]

    def apply(self) -> None:
        """Put the replacements in place of what is there now."""
        self._places = [resolve(place.name) for place in self._places]
        named = {(id(place.owner), place.attribute) for place in self._places}
        for number, place in enumerate(self._places):
            found = elsewhere(place, self._loaded, self._instances)
            self._others[number] = [it for it in found if (id(it.owner), it.attribute) not in named]
        for number, place in enumerate(self._places):
            counted = self._calls[number].counting(
                _given_original(self._with[number], place.function), place.function
            )
            others = self._others[number] if self._everywhere else []
            self._bound[number] = [place, *others, *wrapped(place, self._instances)]
            for where in self._bound[number]:
                where.bind(counted)

    def restore(self) -> list[dict[str, Any]]:
        """Put the originals back; for each patch the fields of `localizer.store.interventions.Changed`."""
        return [
            {
                "target": place.name,
                "in_steps": calls.in_steps,
                "outside": calls.outside,
                "elsewhere": _numbered(others),
                "rebound": self._everywhere,
                "restored": all([where.restore() for where in bound]),
            }
            for place, calls, others, bound in zip(
                self._places, self._calls, self._others, self._bound, strict=True
            )
        ]


def _replacement(files: dict[str, ModuleType], target: str, path: str, name: str) -> Callable[..., Any]:
    """The object of a person's file that stands in for a target; a file is loaded once."""
    if path not in files:
        module_name = f"localizer_patch_{len(files)}_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise CannotTap(f"--patch {target}: {path} is no Python file; name one that ends in .py")
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        files[path] = module
    found = getattr(files[path], name, None)
    if not callable(found):
        what = "nothing called" if found is None else "a value that cannot be called as"
        raise CannotTap(f"--patch {target}: {path} has {what} {name}; check the name")
    replacement: Callable[..., Any] = found
    return replacement


def _given_original(replacement: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """The replacement, with the original as its first argument if it asks for that."""
    try:
        first = next(iter(inspect.signature(replacement).parameters), "")
    except (TypeError, ValueError):
        return replacement
    return functools.partial(replacement, original) if first == ORIGINAL else replacement


def _numbered(places: Sequence[Place]) -> list[str]:
    """Names of places, each once, with how many there are of that name."""
    counts: dict[str, int] = {}
    for place in places:
        counts[place.name] = counts.get(place.name, 0) + 1
    return [name if count == 1 else f"{name} ({count} times)" for name, count in counts.items()]
