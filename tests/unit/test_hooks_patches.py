"""Patches of toy modules: put in place, counted, and taken back to the very original object."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest

from localizer.hooks.layout import CannotTap
from localizer.hooks.patches import Patches

TOY = """
def scale(x):
    return 2 * x

class Base:
    def inherited(self, x):
        return x + 10

class Layer(Base):
    factor = 3

    def __init__(self):
        self.bound = self.forward

    def forward(self, x, bias=0):
        return self.factor * x + bias

    @classmethod
    def made(cls, x):
        return cls.factor + x

    @staticmethod
    def plain(x):
        return x - 1

    @property
    def size(self):
        return 1

    also = forward
"""

CHANGE = """
def plus_one(original, *args, **kwargs):
    return original(*args, **kwargs) + 1

def hundred(*args):
    return 100

def fails(*args):
    raise ZeroDivisionError("planted")

value = 5
"""


@pytest.fixture
def toy() -> Iterator[Any]:
    """A module `toy_vllm`, and `toy_user` that has taken `scale` from it."""
    module, user = ModuleType("toy_vllm"), ModuleType("toy_user")
    sys.modules.update(toy_vllm=module, toy_user=user)
    exec(TOY, vars(module))
    vars(user)["taken"] = vars(module)["scale"]
    yield module
    del sys.modules["toy_vllm"], sys.modules["toy_user"]


@pytest.fixture
def change(tmp_path: Path) -> Iterator[Callable[..., Patches]]:
    """Makes patches of the toy, (target, name of the replacement) each."""
    path = tmp_path / "change.py"
    path.write_text(CHANGE)
    before = set(sys.modules)

    def make(
        *patches: tuple[str, str],
        everywhere: bool = False,
        in_step: Callable[[], bool] = lambda: True,
        instances: list[Any] | None = None,
    ) -> Patches:
        asked = [(f"toy_vllm:{target}", str(path), name) for target, name in patches]
        return Patches(asked, everywhere, in_step, instances or [])

    yield make
    for name in set(sys.modules) - before:
        del sys.modules[name]


Change = Callable[..., Patches]


def test_a_method_gets_the_original_and_comes_back(toy: Any, change: Change) -> None:
    layer, original = toy.Layer(), vars(toy.Layer)["forward"]
    patches = change(("Layer.forward", "plus_one"))
    assert layer.forward(2) == 6  # nothing is changed before it is applied
    patches.apply()
    assert layer.forward(2, bias=1) == 8
    assert toy.Layer.forward.__name__ == "forward"
    (facts,) = patches.restore()
    assert vars(toy.Layer)["forward"] is original
    assert (facts["target"], facts["restored"]) == ("toy_vllm:Layer.forward", True)
    assert (facts["in_steps"], facts["outside"]) == (1, 0)
    assert layer.forward(2) == 6


@pytest.mark.parametrize(
    ("target", "call", "changed"),
    [
        ("scale", lambda toy: toy.scale(4), 9),
        ("Layer.made", lambda toy: toy.Layer.made(4), 8),
        ("Layer.made", lambda toy: toy.Layer().made(4), 8),
        ("Layer.plain", lambda toy: toy.Layer.plain(4), 4),
        ("Layer.plain", lambda toy: toy.Layer().plain(4), 4),
        ("Layer.inherited", lambda toy: toy.Layer().inherited(4), 15),
    ],
)
def test_every_kind_of_function(
    toy: Any, change: Change, target: str, call: Callable[[Any], int], changed: int
) -> None:
    patches = change((target, "plus_one"))
    patches.apply()
    assert call(toy) == changed
    assert patches.restore()[0]["restored"]
    assert call(toy) == changed - 1
    assert "inherited" not in vars(toy.Layer)


def test_an_inherited_method_is_changed_only_below(toy: Any, change: Change) -> None:
    patches = change(("Layer.inherited", "plus_one"))
    patches.apply()
    assert toy.Base().inherited(0) == 10
    assert patches.restore()[0]["elsewhere"] == []


def test_calls_are_counted_within_steps_and_outside(toy: Any, change: Change) -> None:
    stepping = [False]
    patches = change(("scale", "hundred"), in_step=lambda: stepping[0])
    toy.scale(1)
    patches.apply()
    toy.scale(1)
    stepping[0] = True
    assert [toy.scale(1), toy.scale(1)] == [100, 100]
    (facts,) = patches.restore()
    assert (facts["in_steps"], facts["outside"]) == (2, 1)
    toy.scale(1)
    assert facts["in_steps"] == 2


def test_other_names_are_found_and_left(toy: Any, change: Change) -> None:
    user: Any = sys.modules["toy_user"]
    patches = change(("scale", "hundred"), ("Layer.forward", "hundred"))
    patches.apply()
    assert (toy.scale(1), user.taken(1), toy.Layer().also(1)) == (100, 2, 3)
    module, method = patches.restore()
    assert module["elsewhere"] == ["toy_user:taken"]
    assert method["elsewhere"] == ["toy_vllm:Layer.also"]
    assert not module["rebound"]


def test_other_names_are_changed_on_request_and_restored(toy: Any, change: Change) -> None:
    user: Any = sys.modules["toy_user"]
    original, layers = toy.scale, [toy.Layer(), toy.Layer()]
    bound = layers[0].bound
    patches = change(("scale", "hundred"), ("Layer.forward", "plus_one"), everywhere=True, instances=layers)
    patches.apply()
    assert (user.taken(1), toy.Layer().also(1), layers[0].bound(1), layers[1].bound(1)) == (100, 4, 4, 4)
    module, method = patches.restore()
    assert (module["rebound"], module["restored"], module["in_steps"]) == (True, True, 1)
    assert user.taken is original
    assert method["elsewhere"] == ["toy_vllm:Layer.also", "toy_vllm:Layer instance.bound (2 times)"]
    assert layers[0].bound is bound


def test_a_place_that_has_a_patch_of_its_own_is_not_elsewhere(toy: Any, change: Change) -> None:
    user: Any = sys.modules["toy_user"]
    vars(toy)["taken"] = toy.scale
    del user.taken
    patches = change(("scale", "hundred"), ("taken", "plus_one"))
    patches.apply()
    assert (toy.scale(1), toy.taken(1)) == (100, 3)
    assert [facts["elsewhere"] for facts in patches.restore()] == [[], []]


def test_instances_that_hold_the_original_bound_are_named(toy: Any, change: Change) -> None:
    layer = toy.Layer()
    patches = change(("Layer.forward", "hundred"), instances=[layer, layer])
    patches.apply()
    assert (layer.forward(1), layer.bound(1)) == (100, 3)
    assert "toy_vllm:Layer instance.bound" in patches.restore()[0]["elsewhere"]


def test_a_tap_calls_the_replacement_behind_it(
    toy: Any, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A double of a tap, as hooks/ make them: it holds the bound method in its closure."""
    layer, seen = toy.Layer(), list[int]()

    def tap(call: Any) -> Any:
        @functools.wraps(call)
        def tapped(x: int) -> Any:
            seen.append(x)
            return call(x)

        return tapped

    layer.forward = tap(tap(layer.forward))
    patches = change(("Layer.forward", "plus_one"), instances=[layer])
    patches.apply()
    assert layer.forward(2) == 6, "a wrapper that is not localizer's is left alone"
    patches.restore()
    monkeypatch.setattr("localizer.hooks.places.OURS", __name__)
    patches = change(("Layer.forward", "plus_one"), instances=[layer])
    patches.apply()
    assert layer.forward(2) == 7
    (facts,) = patches.restore()
    assert (layer.forward(2), facts["in_steps"], facts["restored"]) == (6, 1, True)
    assert len(seen) == 6


def test_a_bound_method_of_a_module_is_another_name(toy: Any, change: Change) -> None:
    vars(toy)["shortcut"] = toy.Layer.made
    patches = change(("Layer.made", "plus_one"), everywhere=True)
    patches.apply()
    assert isinstance(toy.shortcut, MethodType)
    assert toy.shortcut(1) == 5
    assert patches.restore()[0]["elsewhere"] == ["toy_vllm:shortcut"]
    assert toy.shortcut(1) == 4


def test_what_replaced_the_replacement_is_noticed(toy: Any, change: Change) -> None:
    """The original is put back all the same; only where that does not hold is it not restored."""

    class Stubborn(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, (lambda x: x) if name == "scale" else value)

    patches = change(("scale", "hundred"))
    patches.apply()
    toy.__class__ = Stubborn
    assert not patches.restore()[0]["restored"]


def test_a_failing_replacement_raises_where_it_is_called(toy: Any, change: Change) -> None:
    patches = change(("scale", "fails"))
    patches.apply()
    with pytest.raises(ZeroDivisionError, match="planted"):
        toy.scale(1)
    assert patches.restore()[0]["in_steps"] == 1
    assert toy.scale(1) == 2


@pytest.mark.parametrize(
    ("target", "name", "says"),
    [
        ("nothing", "hundred", "there is no 'nothing' there; check the name"),
        ("Layer.nothing", "hundred", "there is no 'nothing' there"),
        ("scale.attribute", "hundred", "scale is no class there; write module:Class.method"),
        ("Layer", "hundred", "that is no function or method but type; name one"),
        ("Layer.size", "hundred", "that is no function or method but property"),
        ("Layer.factor", "hundred", "that is no function or method but int"),
        ("scale", "nothing", "has nothing called nothing; check the name"),
        ("scale", "value", "has a value that cannot be called as value"),
    ],
)
def test_what_cannot_be_patched(toy: Any, change: Change, target: str, name: str, says: str) -> None:
    with pytest.raises(CannotTap, match=f"^--patch toy_vllm:{target}: .*") as raised:
        change((target, name))
    assert says in str(raised.value)


def test_a_module_or_file_that_is_not_there(toy: Any, tmp_path: Path) -> None:
    with pytest.raises(CannotTap, match="toy_nothing cannot be imported"):
        Patches([("toy_nothing:f", "change.py", "f")], False, lambda: True)
    with pytest.raises(CannotTap, match=r"name one that ends in \.py"):
        Patches([("toy_vllm:scale", str(tmp_path / "change"), "f")], False, lambda: True)
