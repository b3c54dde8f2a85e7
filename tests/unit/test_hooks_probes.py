"""A probe counts calls in and outside of steps, and hits of a cache; what it wraps stays what it was."""

from __future__ import annotations

import importlib
import threading
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from localizer.hooks import probes  # noqa: E402 - needs torch
from localizer.hooks.layout import CannotTap  # noqa: E402
from localizer.wire.probe import Probe  # noqa: E402


class Step:
    """Whether a real step is under way."""

    under_way = True

    def __call__(self) -> bool:
        return self.under_way


@pytest.fixture
def step() -> Step:
    return Step()


@pytest.fixture
def probed() -> ModuleType:
    """A fresh module to be probed."""
    import probed as module

    return importlib.reload(module)


def place(step: Step, *texts: str) -> list[probes.Tally]:
    return probes.install(texts, step)[0]


def counts(tally: probes.Tally) -> tuple[int, int | None, int]:
    return tally.calls, tally.hits, tally.outside


def test_a_method_and_its_cache(step: Step, probed: ModuleType) -> None:
    (tally,) = place(step, "probed:Cache.get,cache=kept")
    one, two = probed.Cache(), probed.Cache()
    assert [one.get(1), one.get(1, factor=5), two.get(1), one.get(key=2, factor=3)] == [1, 1, 1, 6]
    assert counts(tally) == (4, 1, 0)
    step.under_way = False
    assert one.get(1) == 1
    assert counts(tally) == (4, 1, 1)
    assert tally.record() == {
        "target": "probed:Cache.get", "cache": "kept", "calls": 4, "hits": 1, "calls_outside_steps": 1
    }  # fmt: skip
    assert tally.complaint() is None


def test_module_functions(step: Step, probed: ModuleType) -> None:
    kept, before = probed.squared, probed.remembered
    plain, cached, remembered = place(
        step, "probed:squared,cache=TABLE", "probed:Cache.double,cache=made", "probed:remembered"
    )
    assert [probed.squared(3), probed.squared(3), probed.squared(4)] == [9, 9, 16]
    assert counts(plain) == (3, 1, 0)
    kept(3)  # bound before
    assert counts(plain) == (3, 1, 0)
    with pytest.raises(ValueError, match="negative"):
        probed.squared(-1)
    assert counts(plain) == (4, 1, 0)  # a call, and no hit
    assert [probed.Cache.double(2), probed.Cache().double(2)] == [4, 4]
    assert counts(cached) == (2, 1, 0)
    assert [probed.remembered(2), probed.remembered(2)] == [4, 4]
    assert probed.remembered.cache_info() == before.cache_info()
    assert probed.remembered.cache_info().hits == 1
    assert counts(remembered) == (2, None, 0)


def test_properties_and_class_methods(step: Step, probed: ModuleType) -> None:
    getter, maker = place(step, "probed:Cache.size,cache=kept", "probed:Cache.build,cache=made")
    cache = probed.Cache()
    cache.size = 3
    assert (cache.size, cache.size) == (3, 3)
    assert counts(getter) == (2, 2, 0)
    assert (probed.Cache.build(1), probed.Cache.build(1)) == (probed.Cache, probed.Cache)
    assert counts(maker) == (2, 1, 0)


def test_an_inherited_method_is_counted_for_its_class_alone(step: Step, probed: ModuleType) -> None:
    (tally,) = place(step, "probed:Cache.inherited")
    assert (probed.Cache().inherited(), probed.Base().inherited()) == ("base", "base")
    assert counts(tally) == (1, None, 0)


def test_everything_is_put_back(step: Step, probed: ModuleType) -> None:
    names = ("get", "size", "double", "build", "inherited")
    before = [vars(probed.Cache).get(name) for name in names], probed.squared
    _, undo = probes.install([*(f"probed:Cache.{name}" for name in names), "probed:squared"], step)
    assert all(vars(probed.Cache)[name] is not found for name, found in zip(names, before[0], strict=True))
    undo.close()
    assert ([vars(probed.Cache).get(name) for name in names], probed.squared) == before


def test_what_is_wrapped_looks_as_before(step: Step, probed: ModuleType) -> None:
    place(step, "probed:Cache.get", "probed:Cache.size")
    assert probed.Cache.get.__qualname__ == "Cache.get"
    assert probed.Cache.size.__doc__ is None
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        probed.Cache().get(1, other=2)
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        probed.Cache.get()


def test_a_cache_that_the_first_call_makes(step: Step, probed: ModuleType, monkeypatch: Any) -> None:
    def get(self: Any) -> int:
        self.late = {**getattr(self, "late", {}), 1: 1}
        return 1

    monkeypatch.setattr(probed.Cache, "get", get)
    late, never = place(step, "probed:Cache.get,cache=late", "probed:Cache.inherited,cache=nothing")
    cache = probed.Cache()
    cache.get(), cache.get(), cache.inherited()
    assert counts(late) == (2, 1, 0)
    assert counts(never) == (1, None, 0)
    assert never.complaint() == (
        "the cache nothing of the probe probed:Cache.inherited was not found after a call"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no.such.module:f", r"no.such.module cannot be imported \(ModuleNotFoundError"),
        ("probed:nothing", "probed has no nothing"),
        ("probed:Nothing.get", "probed has no Nothing"),
        ("probed:Cache.nothing", "Cache has no nothing"),
        ("probed:Cache", "Cache is a class; name one of its methods"),
        ("probed:number", "it is a int, neither a function"),
        ("probed:squared.inner", "squared is no class"),
        ("probed:Cache.once", "it is a cached_property, neither"),
        ("probed:Cache.__str__", "it is a wrapper_descriptor, neither"),
        ("probed:squared,cache=NOTHING", "probed has no NOTHING"),
        ("builtins:str.upper", "it is a method_descriptor, neither"),
    ],
)
def test_what_cannot_be_wrapped(step: Step, probed: ModuleType, text: str, said: str) -> None:
    target = text.partition(",")[0]
    with pytest.raises(CannotTap, match=f"^the probe {target} cannot be placed: {said}"):
        place(step, text)


def test_threads_count_together(step: Step, probed: ModuleType) -> None:
    (tally,) = place(step, "probed:Cache.double")
    threads = [
        threading.Thread(target=lambda: [probed.Cache.double(1) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts(tally) == (8000, None, 0)


def test_compiled_code_is_not_seen_and_stays_whole(step: Step, probed: ModuleType, monkeypatch: Any) -> None:
    """The tally is no part of what torch traces: `fullgraph` would refuse its lock."""
    monkeypatch.setattr(probed, "squared", lambda value: value * value)
    (tally,) = place(step, "probed:squared")
    compiled = torch.compile(lambda value: probed.squared(value) + 1, backend="eager", fullgraph=True)
    value = torch.tensor([3.0])
    assert [compiled(value).tolist() for _ in range(2)] == [[10.0], [10.0]]
    assert counts(tally) == (0, None, 0)
    probed.squared(value)
    assert counts(tally) == (1, None, 0)


@pytest.mark.parametrize(
    ("text", "probe"),
    [
        ("a.b:f", Probe("a.b", "f")),
        ("a:C.m,cache=_c", Probe("a", "C.m", "_c")),
        ("a:C.D.m,cache=x.y", Probe("a", "C.D.m", "x.y")),
    ],
)
def test_how_probes_are_written(text: str, probe: Probe) -> None:
    assert Probe.parse(text) == probe
    assert probe.target == text.partition(",")[0]


@pytest.mark.parametrize(
    "text",
    ["", "a", "a.b", "a:", ":f", "a:f,", "a:f,cache=", "a:f,size=x", "a:f()", "a:f g", "a:b:c", "a..b:f"],
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not module:Class\.method"):
        Probe.parse(text)
