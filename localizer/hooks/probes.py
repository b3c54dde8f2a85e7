"""Probes: how often named functions are called in real steps, and how often a cache of theirs served them."""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import torch

from localizer.hooks import layout
from localizer.hooks.replace import replace
from localizer.wire.probe import Probe

_CACHED = type(functools.lru_cache(int))
_PLAIN = (types.FunctionType, types.BuiltinFunctionType, _CACHED)
_OF_A_CACHE = ("cache_info", "cache_clear", "cache_parameters")


class Tally:
    """The counts of one probe; it never raises.

    Attributes:
        calls, outside: calls in recorded steps, and all others.
        hits: calls in recorded steps that returned while the cache had not grown; None without a cache.
        lacking: whether the cache was not there, or has no length.
    """

    def __init__(self, probe: Probe, in_step: Callable[[], bool]) -> None:
        self.probe = probe
        self._in_step = in_step
        self._size = attrgetter(probe.cache) if probe.cache else None
        self._lock = threading.Lock()  # micro-batches run in threads
        self.calls = self.outside = 0
        self._hits = 0
        self.lacking = False

    def begins(self, holder: Any) -> int | None:
        """A call begins: the length of the cache of `holder` where this call may become a hit."""
        within = self._in_step()
        with self._lock:
            self.calls += within
            self.outside += not within
        if not within or self._size is None:
            return None
        try:
            return len(self._size(holder))
        except Exception:  # it may be made by the first call
            return 0

    def returned(self, holder: Any, before: int | None) -> None:
        """The call has returned."""
        if before is None or self._size is None:
            return
        try:
            grown = len(self._size(holder)) > before
        except Exception:
            self.lacking = True
            return
        with self._lock:
            self._hits += not grown

    @property
    def hits(self) -> int | None:
        return None if self._size is None or self.lacking else self._hits

    def record(self) -> dict[str, Any]:
        """The counts as plain data."""
        return {
            "target": self.probe.target,
            "cache": self.probe.cache,
            "calls": self.calls,
            "hits": self.hits,
            "calls_outside_steps": self.outside,
        }

    def complaint(self) -> str | None:
        """That the cache was not found, if so."""
        if not self.lacking:
            return None
        return f"the cache {self.probe.cache} of the probe {self.probe.target} was not found after a call"


def install(probes: Sequence[str], in_step: Callable[[], bool]) -> tuple[list[Tally], ExitStack]:
    """Count calls of what the probes name, from now on, until the stack is closed.

    The name is bound to a function that counts, so calls that look it up from now on are seen; those of
    objects bound before (`from module import function`, a bound method that is kept) are not, nor are calls
    in code that torch compiles.

    Raises:
        layout.CannotTap: a target does not exist or cannot be wrapped.
    """
    undo, tallies = ExitStack(), []
    for text in probes:
        tally = Tally(Probe.parse(text), in_step)
        try:
            _wrap(undo, tally)
        except _Cannot as error:
            raise layout.CannotTap(f"the probe {tally.probe.target} cannot be placed: {error}") from None
        tallies.append(tally)
    return tallies, undo


class _Cannot(Exception):
    """Why a target cannot be wrapped."""


def _wrap(undo: ExitStack, tally: Tally) -> None:
    """Bind the target's name to a function that counts."""
    probe = tally.probe
    *outer, name = probe.path.split(".")
    try:
        owner: Any = importlib.import_module(probe.module)
    except Exception as error:
        raise _Cannot(f"{probe.module} cannot be imported ({type(error).__name__}: {error})") from None
    for part in outer:
        owner = _attribute(owner, part)
    if outer and not isinstance(owner, type):
        raise _Cannot(f"{'.'.join(outer)} is no class")
    _attribute(owner, name)
    if isinstance(owner, type):
        replacement = _of_class(inspect.getattr_static(owner, name), owner, tally)
    else:
        if tally.probe.cache:
            _attribute(owner, tally.probe.cache.split(".")[0])
        replacement = _counting(_function(getattr(owner, name)), tally, lambda args: owner)
    try:
        replace(undo, owner, name, replacement)
    except (TypeError, AttributeError) as error:
        raise _Cannot(str(error)) from None


def _attribute(owner: Any, name: str) -> Any:
    try:
        return inspect.getattr_static(owner, name)
    except AttributeError:
        raise _Cannot(f"{getattr(owner, '__name__', owner)} has no {name}") from None


def _of_class(found: Any, owner: type, tally: Tally) -> Any:
    """What stands in for an attribute of a class, as the same kind of attribute."""
    if isinstance(found, staticmethod):
        return staticmethod(_counting(_function(found.__func__), tally, lambda args: owner))
    if isinstance(found, classmethod):
        return classmethod(_counting(_function(found.__func__), tally, _first))
    if isinstance(found, property) and found.fget is not None:
        getter = _counting(_function(found.fget), tally, _first)
        return property(getter, found.fset, found.fdel, found.__doc__)
    return _counting(_function(found), tally, _first)


def _first(args: tuple[Any, ...]) -> Any:
    return args[0] if args else None


def _function(found: Any) -> Callable[..., Any]:
    if isinstance(found, type):
        raise _Cannot(f"{found.__qualname__} is a class; name one of its methods")
    if not isinstance(found, _PLAIN):
        raise _Cannot(f"it is a {type(found).__name__}, neither a function, a method nor a property")
    return found


def _counting(
    call: Callable[..., Any], tally: Tally, holder: Callable[[tuple[Any, ...]], Any]
) -> Callable[..., Any]:
    """`call`, counted; its results and exceptions are its own."""

    @functools.wraps(call)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # it is traced, not run: nothing of the tally may become a guard
            return call(*args, **kwargs)
        before = tally.begins(holder(args))
        result = call(*args, **kwargs)
        tally.returned(holder(args), before)
        return result

    for name in _OF_A_CACHE:  # not in the `__dict__` that `wraps` copies
        if hasattr(call, name):
            setattr(counted, name, getattr(call, name))
    return counted
