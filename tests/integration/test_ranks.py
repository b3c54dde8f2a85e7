"""Captures of two workers of a real vLLM (tensor parallelism on the CPU): neutral, whole, repeatable, and a
fault of one of them is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import EAGER, IN_PROCESS, Capturing

from localizer.diff import diff
from localizer.diff.result import DIVERGED, IDENTICAL
from localizer.sources.fault import MODELS, Fault
from localizer.store.reader import Capture
from localizer.store.verify import SOUND, verify
from localizer.wire.spec import HIDDEN, INPUT_IDS, LOGITS, SITE_KINDS, TOKEN

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two processors"),
]

PARALLEL = EAGER | {"tensor_parallel_size": 2}

CORES = IN_PROCESS | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""vLLM gives each worker a NUMA node by itself, and most machines have one."""

LAYER = "model.layers.3.self_attn.attn"

ONE_RANK = Fault(
    MODELS / "llama.py",
    "        q, k = self.rotary_emb(positions, q, k)\n",
    f'q = q * 1.0078125 if self.attn.layer_name == "{LAYER}" and torch.distributed.get_rank() == 1 else q',
)


@pytest.fixture
def parallel(capturing: Capturing) -> Callable[..., Capture]:
    """Make a capture of two workers, once in the session."""

    def work(name: str, **options: object) -> Capture:
        return capturing(name, environment=CORES, engine=PARALLEL, payload="all", **options)

    return work


def test_both_workers_are_recorded(parallel: Callable[..., Capture]) -> None:
    """The self-checks pass: rows account for the tokens, logits come again, both ranks did the same steps."""
    capture = parallel("ranks")
    assert capture.reasons == []
    assert verify(capture.folder).state == SOUND
    assert capture.open.observer.ranks == 2
    names = [site.name for site in capture.sites]
    assert names[:2] == [INPUT_IDS, f"{INPUT_IDS}@1"]
    for base in (HIDDEN, LOGITS, TOKEN):
        assert [name for name in names if name.startswith(base)] == [base, f"{base}@1"]
    shapes = {site.name: site.shape for site in capture.sites}
    assert [shapes[f"{LAYER}/query[{rank}/2]"] for rank in (0, 1)] == [(2, 64), (2, 64)]
    assert [shapes[f"{LAYER}/key[{rank}/2]"] for rank in (0, 1)] == [(1, 64), (1, 64)]
    assert set(capture.table.recorded().tolist()) == {
        len(capture.table),
        capture.manifest.counts["logit_rows"],
    }
    columns = {name: number for number, name in enumerate(names)}
    for base in (INPUT_IDS, HIDDEN, LOGITS, TOKEN):  # which every worker computes whole, and equal
        one, other = (capture.table.digest[:, columns[name]] for name in (base, f"{base}@1"))
        assert (one == other).all()
    tensors = capture.manifest.weights.tensors
    assert {name.rpartition("@")[2] for name in tensors} == {"0/2", "1/2"}
    assert {"writer-0", "writer-1", "worker-0", "worker-1"} <= set(capture.manifest.peak_memory_bytes)


@pytest.mark.slow
def test_taps_are_neutral(parallel: Callable[..., Capture]) -> None:
    tapped, untapped = parallel("ranks"), parallel("ranks-untapped", taps=False)
    assert untapped.outputs == tapped.outputs


@pytest.mark.slow
def test_two_runs_are_identical(parallel: Callable[..., Capture]) -> None:
    result = diff(parallel("ranks"), parallel("ranks-again"), payload=True)
    assert result.verdict == IDENTICAL
    assert result.coverage.stored.pairs == result.coverage.pairs.compared


@pytest.mark.slow
def test_one_worker_compares_with_two_by_ranges_of_heads(
    capturing: Capturing, parallel: Callable[..., Capture]
) -> None:
    """In the first layer nothing was summed over workers yet; after it the order of sums may differ."""
    single = capturing("ranks-split", payload="all", digest_split=2)
    assert verify(single.folder).state == SOUND
    result = diff(single, parallel("ranks"), payload=True)
    assert result.coverage.sites.split == {}
    assert result.coverage.sites.candidate_only == []
    differ = {site.name: site.rows_differ for site in result.sites}
    first = [f"model.layers.0.self_attn.attn/{part}[{i}/2]" for part in SITE_KINDS for i in (0, 1)]
    assert [differ[name] for name in first] == [0] * 8
    assert all(site.rows_compared for site in result.sites)


@pytest.mark.slow
def test_a_fault_of_one_worker_is_named(
    parallel: Callable[..., Capture], overlay: Callable[[Fault], Path]
) -> None:
    result = diff(parallel("ranks-fault", overlay=overlay(ONE_RANK)), parallel("ranks"))
    assert result.verdict == DIVERGED
    assert result.first.site == f"{LAYER}/query[1/2]"
    assert result.first.segment.after == "model.layers.2.self_attn.attn/output[1/2]"
    (found,) = [pattern for pattern in result.signatures if pattern.code == "one-rank"]
    assert (found.number, found.rows) == (1, 3)
