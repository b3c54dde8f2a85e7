"""Beside the tensors: what real engines are asked for in each step, load, compile and run on."""

from __future__ import annotations

import json
import tempfile
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from engines import COMPILED, EAGER, Capturing

from localizer.diff.pipeline import diff
from localizer.store.reader import Capture
from localizer.store.schema import DRAFT_PADDING, Manifest
from localizer.store.verify import verify

pytestmark = pytest.mark.engine


def manifest(capture: Capture) -> Manifest:
    assert capture.manifest is not None
    return capture.manifest


@pytest.fixture(scope="module")
def eager(capturing: Capturing) -> Capture:
    return capturing("facts-eager", matrix="1,2", repeats=2)


def test_every_step_is_traced(eager: Capture) -> None:
    assert verify(eager.folder).reasons == []
    columns, steps = eager.table.columns, eager.steps
    assert [step.step for step in steps] == sorted(set(columns["step"].tolist()))
    for step in steps:
        rows = np.flatnonzero(columns["step"] == step.step)
        for request, count, first in zip(step.requests, step.scheduled, step.computed, strict=True):
            own = rows[columns["request"][rows] == request]
            assert columns["position"][own].tolist() == list(range(first, first + count))
        assert (step.graph, step.padded, step.batch["num_tokens"]) == ("NONE", len(rows), len(rows))
        assert step.backend["max_query_len"] == max(step.scheduled)
        assert step.backend["num_actual_tokens"] == sum(step.scheduled)
        assert step.blocks is not None
        assert step.slots is not None
    assert sorted(request for step in steps for request in step.finished) == [
        0,
        1,
        2,
        3,
    ]  # not the last round


def test_equal_runs_have_equal_traces(capturing: Capturing, eager: Capture) -> None:
    """Physical blocks as well; weights, configuration, libraries: nothing differs but names."""
    other = capturing("facts-again", matrix="1,2", repeats=2)
    assert other.steps == eager.steps
    result = diff(other, eager)
    assert (result.verdict, result.differences) == ("identical", [])


def test_cached_tokens_and_preemption(capturing: Capturing) -> None:
    """A prompt that was computed before comes from the cache; with few blocks, requests are preempted."""
    engine = EAGER | {"num_gpu_blocks_override": 9, "block_size": 32, "max_model_len": 128}
    capture = capturing(
        "facts-preempted", matrix="1,4", repeats=1, prompt_tokens=40, max_tokens=40, engine=engine
    )
    assert verify(capture.folder).reasons == []
    cached = {
        request: count
        for step in capture.steps
        for request, count in zip(step.requests, step.cached, strict=True)
        if count
    }
    assert cached[1] == 32  # the first block of the prompt of r00.00
    assert sum(len(step.resumed) for step in capture.steps) > 0


def test_draft_tokens(capturing: Capturing) -> None:
    capture = capturing("facts-drafts", matrix="1,2", max_tokens=12, speculative_model="tiny-eagle3")
    assert verify(capture.folder).reasons == []
    kinds = capture.table.columns["kind"]
    assert sum(sum(step.drafts) for step in capture.steps) > 0
    assert sum(sum(step.scheduled) for step in capture.steps) == int((kinds < DRAFT_PADDING).sum())
    weights = manifest(capture).weights
    assert weights is not None
    assert [name for name in weights.tensors if name.startswith("draft:") and "fc" in name]


def test_weights_identity_and_configuration(eager: Capture) -> None:
    found = manifest(eager)
    assert found.weights is not None
    assert all(found.weights.tensors.values())
    assert len(set(found.weights.tensors.values())) > 30
    assert found.compiled is None
    assert found.identity is not None
    assert "torch/lib/libtorch_cpu.so" in found.identity.native
    # vLLM for the CPU has a library for each instruction set
    assert any(name.startswith("vllm/_C") and name.endswith(".abi3.so") for name in found.identity.native)
    assert all(found.identity.native.values())
    assert found.identity.python.files > 100
    assert found.identity.python.changed == []
    assert found.identity.processor is not None
    assert found.config["model_config"]["enforce_eager"] is True
    assert found.config["cache_config"]["num_gpu_blocks"] == found.engine["num_kv_blocks"]
    assert f"{tempfile.gettempdir()}/localizer-" not in json.dumps(
        found.config
    )  # no folder of this run alone
    phases = {"import", "load", "generate", "describe", "total"}
    assert set(found.durations) == phases | {"program", "worker-0", "writer"}


def test_other_weights_are_listed(capturing: Capturing, eager: Capture, tmp_path: Path) -> None:
    """One weight of the model is another: the diff names it, whatever it makes of the rest."""
    from safetensors.numpy import load_file, save_file

    model = Path(eager.open.workload.model.path)
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (weights,) = tmp_path.glob("*.safetensors")
    table = load_file(weights)
    name = "model.layers.3.mlp.down_proj.weight"
    table[name] = np.ascontiguousarray(table[name][::-1])
    save_file(table, weights, metadata={"format": "pt"})
    other = capturing("facts-weights", model=str(tmp_path), matrix="1", repeats=1, weights=True)
    settings = [item.setting for item in diff(other, eager).differences]
    assert [item for item in settings if item.startswith("loaded weights")] == [
        "loaded weights",
        f"loaded weights.{name}",
    ]
    unread = capturing("facts-unread", matrix="1", repeats=1, weights=False)
    assert manifest(unread).weights is None


@pytest.mark.slow
def test_compiled_code(capturing: Capturing) -> None:
    first = capturing("facts-compiled", engine=COMPILED)
    again = capturing("facts-compiled-again", engine=COMPILED)
    found, other = manifest(first).compiled, manifest(again).compiled
    assert found is not None
    assert other is not None
    assert found.mode == "DYNAMO_TRACE_ONCE"
    assert found.backend == "inductor"
    assert found.counters
    assert [name for name in found.files if name.endswith((".cpp", ".py"))]
    assert found.files == other.files
    names = {item.setting for item in diff(again, first).differences}
    assert names <= {"compiled.cache"}


def contents_by_prefix(capture: Capture, layer: str) -> dict[tuple[str, int], tuple[str, str]]:
    """Digests of keys and values by prompt and number of computed tokens."""
    return {
        (capture.requests[request].rpartition(".")[2], first + count): (key, value)
        for step in capture.steps
        for request, first, count, key, value in zip(
            step.requests, step.computed, step.scheduled, step.keys[layer], step.values[layer], strict=True
        )
    }


def test_kv_contents_do_not_depend_on_blocks(capturing: Capturing) -> None:
    """A prompt whose first block is cached and lies elsewhere has equal contents; rows are found in them."""
    work = {"matrix": "1,2,1", "prompt_tokens": 40, "max_tokens": 4, "kv_contents": True, "payload": "all"}
    engine = EAGER | {"block_size": 32}
    cached = capturing("facts-contents", engine=engine, **work)
    fresh = capturing("facts-fresh", engine=engine | {"enable_prefix_caching": False}, **work)
    assert any(any(step.cached) for step in cached.steps)
    assert not any(any(step.cached) for step in fresh.steps)
    layers = list(manifest(cached).kv_contents)
    assert len(layers) == 8
    assert set(manifest(cached).kv_contents.values()) <= {"cpu-vec", "cpu-amx"}
    for layer in layers:
        ours, theirs = contents_by_prefix(cached, layer), contents_by_prefix(fresh, layer)
        shared = ours.keys() & theirs.keys()
        assert len(shared) >= 8
        assert all(ours[key] == theirs[key] for key in shared)
        assert len(set(ours.values())) == len(ours)


def test_kv_contents_are_the_recorded_rows(capturing: Capturing) -> None:
    """The digest after a step is that of all keys that were recorded so far, one row after the other."""
    capture = capturing("facts-rows", matrix="1", kv_contents=True, payload="all", engine=EAGER)
    layer, columns = "model.layers.2.self_attn.attn", capture.table.columns
    for step in capture.steps:
        for kind, told in (("key", step.keys), ("value", step.values)):
            rows = np.flatnonzero(columns["step"] <= step.step)
            kept = [capture.row_payload(f"{layer}/{kind}", int(row)) for row in rows]
            blob = b"".join(row.tobytes() for row in kept if row is not None)
            assert blake2b(blob, digest_size=16).hexdigest() == told[layer][0]
