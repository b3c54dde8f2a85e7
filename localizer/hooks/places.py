"""Places at which Python objects are bound: what `module:attr` names, and where else that is bound."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from localizer.hooks.layout import CannotTap

_MISSING = object()

OURS = "localizer.hooks."
"""What the names of the modules begin with whose functions stand in for those of instances: the taps."""


@dataclass(frozen=True)
class Place:
    """An attribute of a module, class or instance, or the contents of a closure's cell.

    Attributes:
        name: `module:attr`, or a description of the instance's class and attribute.
        owner, attribute: what holds it, and under which name.
        raw: what was there, unbound: a staticmethod or classmethod object as such.
        own: whether the owner itself held it, not a class above.
    """

    name: str
    owner: Any
    attribute: str
    raw: Any
    own: bool = True

    @property
    def function(self) -> Any:
        """What is called in the end."""
        return unwrap(self.raw)

    def bind(self, function: Any) -> None:
        """Bind a function here, of the kind that was here: static, of the class, bound, or plain."""
        raw, found = self.raw, function
        if isinstance(raw, (staticmethod, classmethod)):
            found = type(raw)(function)
        elif isinstance(raw, MethodType):
            found = MethodType(function, raw.__self__)
        setattr(self.owner, self.attribute, found)

    def restore(self) -> bool:
        """Put back what was here; whether it is the very same object."""
        if self.own:
            setattr(self.owner, self.attribute, self.raw)
        else:
            delattr(self.owner, self.attribute)
        if isinstance(self.owner, CellType):
            return self.owner.cell_contents is self.raw
        return inspect.getattr_static(self.owner, self.attribute, None) is self.raw


def unwrap(raw: Any) -> Any:
    """The function inside a staticmethod, a classmethod or a bound method; anything else as it is."""
    return raw.__func__ if type(raw) in (staticmethod, classmethod, MethodType) else raw  # no proxy is woken


def resolve(name: str) -> Place:
    """The place that `module:attr` or `module:Class.attr` names.

    Raises:
        CannotTap: there is none, or it holds no function or method.
    """
    module_name, _, path = name.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise CannotTap(
            f"--patch {name}: {module_name} cannot be imported ({error}); check the name"
        ) from None
    *way, attribute = path.split(".")
    for part in way:
        owner = getattr(owner, part, _MISSING)
        if not isinstance(owner, (type, ModuleType)):
            raise CannotTap(f"--patch {name}: {part} is no class there; write module:Class.method")
    raw = inspect.getattr_static(owner, attribute, _MISSING)
    if raw is _MISSING:
        raise CannotTap(f"--patch {name}: there is no {attribute!r} there; check the name")
    function = unwrap(raw)
    method = not isinstance(owner, type) or hasattr(type(raw), "__get__")
    if not callable(function) or isinstance(function, type) or not method:
        raise CannotTap(f"--patch {name}: that is no function or method but {type(raw).__name__}; name one")
    return Place(name, owner, attribute, raw, attribute in vars(owner))


def elsewhere(place: Place, ignored: Collection[str], instances: Iterable[Any]) -> Iterator[Place]:
    """Every other place that holds the function of `place`: in modules and their classes, bound in instances.

    Args:
        place: of the function; where a class inherits it, those above it are left out.
        ignored: names of modules that are not looked at.
        instances: objects whose own attributes are looked at. What others hold, as closures do, is not found.
    """
    function, above = place.function, getattr(place.owner, "__mro__", ()) if not place.own else ()
    seen = {id(owner) for owner in above}
    for module_name, module in list(sys.modules.items()):
        if module_name in ignored or not isinstance(module, ModuleType):
            continue
        for owner, path in _owners(module, module_name):
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            for attribute, raw in list(vars(owner).items()):
                here = owner is place.owner and attribute == place.attribute
                if unwrap(raw) is function and not here:
                    yield Place(f"{path}{attribute}", owner, attribute, raw)
    for owner, attribute, raw in _attributes(instances):
        if _binds(raw, place):
            kind = type(owner)
            yield Place(f"{kind.__module__}:{kind.__qualname__} instance.{attribute}", owner, attribute, raw)


def wrapped(place: Place, instances: Iterable[Any]) -> Iterator[Place]:
    """Where localizer's own taps of instances hold the function of `place`, bound: cells of closures."""
    for _, attribute, tap in _attributes(instances):
        while type(tap) is FunctionType and tap.__globals__.get("__name__", "").startswith(OURS):
            for cell in tap.__closure__ or ():
                if _binds(_contents(cell), place):
                    yield Place(f"tap of {attribute}", cell, "cell_contents", cell.cell_contents)
            tap = getattr(tap, "__wrapped__", None)


def _binds(raw: Any, place: Place) -> bool:
    """Whether something is the function of a place, bound to an instance that would find it there."""
    if type(raw) is not MethodType or raw.__func__ is not place.function:
        return False
    return not isinstance(place.owner, type) or isinstance(raw.__self__, place.owner)


def _attributes(instances: Iterable[Any]) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and value of the attributes that instances have of their own; each instance once."""
    for owner in {id(it): it for it in instances if hasattr(it, "__dict__")}.values():
        yield from ((owner, attribute, raw) for attribute, raw in list(vars(owner).items()))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _owners(module: ModuleType, name: str) -> Iterator[tuple[Any, str]]:
    """A module and the classes that it defines, each with what the names of its attributes begin with."""
    yield module, f"{name}:"
    for attribute, value in list(vars(module).items()):
        if issubclass(type(value), type) and getattr(value, "__module__", None) == name:
            yield value, f"{name}:{attribute}."
