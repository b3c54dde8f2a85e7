"""Rows are told apart whatever batch, chunk, cache hit or preemption they come from, and align one to one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engines import EAGER, Capturing

from localizer.diff.align import align
from localizer.diff.pipeline import diff
from localizer.store.reader import Capture
from localizer.store.schema import KINDS

pytestmark = pytest.mark.engine

LONG = {"prompt_tokens": 300, "max_tokens": 24, "matrix": "1,4", "repeats": 2}
"""Prompts of more than two KV blocks (128 tokens each), each round asked twice."""

ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-cache": {"enable_prefix_caching": False},
    "chunked": {"enable_prefix_caching": False, "max_num_batched_tokens": 128, "max_num_seqs": 128},
    "few-seqs": {"enable_prefix_caching": False, "max_num_seqs": 2},
}

GROWING = {"prompt_tokens": 120, "max_tokens": 24, "matrix": "4", "repeats": 1}
"""Requests that need a second KV block while they decode."""


@pytest.fixture(scope="session")
def arm(capturing: Capturing) -> Callable[[str], Capture]:
    """The capture of an arm of the long workload."""
    return lambda name: capturing(f"rows-{name}", engine=EAGER | ARMS[name], **LONG)


def kinds(capture: Capture) -> Counter[str]:
    """How many rows there are of each kind."""
    return Counter(KINDS[code] for code in capture.table.columns["kind"])


def test_a_small_buffer_makes_vllm_wait_and_loses_nothing(
    arm: Callable[[str], Capture], capturing: Capturing
) -> None:
    small = capturing("rows-small-buffer", engine=EAGER | ARMS["no-cache"], buffer=1, payload="all", **LONG)
    assert (small.complete, small.reasons) == (True, [])
    assert diff(small, arm("no-cache")).verdict == "identical"


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_accounts_for_its_work(arm: Callable[[str], Capture], name: str) -> None:
    capture = arm(name)
    assert (capture.complete, capture.reasons) == (True, [])


def test_a_warm_prefix_cache_leaves_rows_out_and_says_so(arm: Callable[[str], Capture]) -> None:
    capture = arm("plain")
    assert capture.manifest is not None
    cached = {output.request: output.cached_tokens for output in capture.manifest.outputs}
    assert cached["r00.00"] == 0
    assert {cached[f"r{number:02d}.00"] for number in (1, 2, 3)} == {256}
    columns = capture.table.columns
    late = columns["request"] == capture.requests.index("r02.00")
    assert columns["position"][late].min() == 256
    assert diff(capture, arm("no-cache")).tokens.requests_differ == 0


def test_chunks_are_named_and_align_with_whole_prompts(arm: Callable[[str], Capture]) -> None:
    chunked, whole = arm("chunked"), arm("no-cache")
    assert kinds(whole)["prefill-chunk"] == 0
    assert kinds(chunked)["prefill-chunk"] == kinds(whole)["prefill"] == 300 * 10
    assert len(align(chunked, whole)) == len(chunked.table) == len(whole.table)
    mixed = chunked.table.columns
    steps = [set(mixed["kind"][mixed["step"] == step].tolist()) for step in np.unique(mixed["step"])]
    assert {
        KINDS.index("prefill-chunk"),
        KINDS.index("decode"),
    } in steps  # in one forward


def test_fewer_sequences_than_requests(arm: Callable[[str], Capture]) -> None:
    few, whole = arm("few-seqs"), arm("no-cache")
    columns = few.table.columns
    for step in np.unique(columns["step"]):
        assert len(np.unique(columns["request"][columns["step"] == step])) <= 2
    last = [
        columns["step"][columns["request"] == few.requests.index(f"r01.{index:02d}")].max()
        for index in range(4)
    ]
    assert len(set(last)) > 1  # some are finished while others go on, and still no row is another's
    assert len(align(few, whole)) == len(few.table) == len(whole.table)


def test_rows_computed_again_after_preemption_are_occurrences(capturing: Capturing) -> None:
    engine = EAGER | {"enable_prefix_caching": False, "max_model_len": 256}
    whole = capturing("rows-growing", engine=engine, **GROWING)
    capture = capturing("rows-preempted", engine=engine | {"num_gpu_blocks_override": 6}, **GROWING)
    assert (capture.complete, capture.reasons) == (True, [])
    again = capture.table.columns["occurrence"] > 0
    assert again.any()
    assert len(align(capture, whole)) == len(whole.table) == int((~again).sum())
    result = diff(capture, whole)
    assert result.coverage.rows.paired == len(whole.table)
    assert result.tokens.requests_differ == 0 or result.first is not None
