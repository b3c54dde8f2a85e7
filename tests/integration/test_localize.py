"""What localizer is for: a change in a real vLLM is named, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import COMPILED, Capturing

from localizer.diff.pipeline import diff
from localizer.sources.fault import Fault, in_layer
from localizer.workload.tiny import LAYERS

pytestmark = pytest.mark.engine


def upstream_of(layer: int) -> tuple[str, str]:
    """(site before, site after) the code between the attention of `layer` and what follows it."""
    after = f"model.layers.{layer}.self_attn.attn/output"
    last = layer == LAYERS - 1
    return after, "model/hidden_states" if last else f"model.layers.{layer + 1}.self_attn.attn/query"


def test_identical_sources_are_identical(capturing: Capturing) -> None:
    result = diff(capturing("again"), capturing("parent"))
    assert (result.verdict, result.first, result.reasons) == ("identical", None, [])
    assert sum(site.rows_compared for site in result.sites) == 63 * 34 + 18 * 3
    assert all(site.rows_differ == 0 for site in result.sites)


FEW = (0, LAYERS // 2, LAYERS - 1)


@pytest.mark.parametrize(
    "layer",
    [pytest.param(layer, marks=[] if layer in FEW else [pytest.mark.slow]) for layer in range(LAYERS)],
)
def test_a_change_in_any_layer_is_named(
    capturing: Capturing, overlay: Callable[[Fault], Path], layer: int
) -> None:
    result = diff(capturing(f"layer-{layer}", overlay=overlay(in_layer(layer))), capturing("parent"))
    after, before = upstream_of(layer)
    assert result.verdict == "diverged"
    assert result.first is not None
    assert (result.first.segment.after, result.first.segment.before) == (after, before)
    assert (result.first.request, result.first.step) == ("r00.00", 0)
    equal = {site.name for site in result.sites if site.rows_differ == 0}
    assert equal >= {f"model.layers.{index}.self_attn.attn/output" for index in range(layer + 1)}


@pytest.mark.slow
def test_a_change_is_named_in_compiled_mode(capturing: Capturing, overlay: Callable[[Fault], Path]) -> None:
    parent = capturing("compiled", engine=COMPILED)
    candidate = capturing("compiled-layer-3", engine=COMPILED, overlay=overlay(in_layer(3)))
    assert parent.manifest is not None
    assert parent.manifest.engine["compilation_mode"] != "NONE"
    assert parent.manifest.counts["dummy_forwards"] > 0
    first = diff(candidate, parent).first
    assert first is not None
    assert (first.segment.after, first.segment.before) == upstream_of(3)


@pytest.mark.slow
def test_eager_against_compiled_is_compared(capturing: Capturing) -> None:
    eager, compiled = capturing("parent"), capturing("compiled", engine=COMPILED)
    result = diff(compiled, eager)
    differing = [site.name for site in result.sites if site.rows_differ]
    assert result.verdict == ("diverged" if differing else "identical")
    if result.first is not None:
        assert result.first.site in differing


def test_the_multiprocess_engine_core_gives_the_same(capturing: Capturing) -> None:
    result = diff(capturing("multiprocess", environment={}), capturing("parent"))
    assert (result.verdict, result.reasons) == ("identical", [])


def test_a_selection_of_layers_is_captured_alone(capturing: Capturing) -> None:
    some = capturing("some-layers", layers="0,5-6", payload="none")
    layers = {site.name.split(".")[2] for site in some.sites if site.name.startswith("model.layers")}
    assert layers == {"0", "5", "6"}
    assert some.payload == {}
    result = diff(some, capturing("parent"))
    assert result.verdict == "identical"
