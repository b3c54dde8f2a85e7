"""Speculation on a real engine: EAGLE3, n-gram and a draft model, against none and against faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Capturing, rows_stand_alone

from localizer.diff.align import align
from localizer.diff.pipeline import diff
from localizer.sources.fault import Fault, in_draft, in_layer
from localizer.store.expected import is_draft
from localizer.store.reader import Capture
from localizer.store.schema import DECODE, KINDS, PREFILL, VERIFY_ACCEPTED, VERIFY_REJECTED
from localizer.wire.spec import INPUT_IDS, POSITIONS

pytestmark = pytest.mark.engine

NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SPECULATION: dict[str, dict[str, Any]] = {
    "none": {},
    "eagle3": {"speculative_model": "tiny-eagle3"},
    "ngram": {"speculative": NGRAM},
    "draft-model": {"speculative_model": "tiny", "speculative": {"method": "draft_model"}},
}


@pytest.fixture(scope="session")
def speculating(capturing: Capturing) -> Callable[..., Capture]:
    """A capture of 20 tokens a request with the named kind of speculation."""

    def work(kind: str, name: str = "", **options: object) -> Capture:
        return capturing(f"speculating-{kind}{name}", max_tokens=20, **SPECULATION[kind], **options)

    return work


def kinds(capture: Capture) -> Counter[str]:
    """How many rows there are of each kind."""
    return Counter(KINDS[code] for code in capture.table.columns["kind"])


@pytest.mark.parametrize("kind", ["eagle3", "ngram", "draft-model"])
def test_accepted_rows_pair_with_rows_of_no_speculation(
    speculating: Callable[..., Capture], kind: str
) -> None:
    capture, plain = speculating(kind), speculating("none")
    assert (capture.complete, capture.reasons) == (True, [])
    result = diff(capture, plain)
    assert result.tokens.requests_differ == 0
    if rows_stand_alone():
        assert result.verdict == "identical"
    else:  # verification computes more rows at a time; what both runs take in is the same all the same
        inputs = [site for site in result.sites if site.name in (INPUT_IDS, POSITIONS)]
        assert [site.rows_differ for site in inputs] == [0, 0]
    pairing = align(capture, plain)
    ours, theirs = capture.table.columns["kind"], plain.table.columns["kind"]
    fed = capture.table.columns["position"] < 16 + 20 - 1  # a verification may run past what was asked for
    accepted = np.flatnonzero((ours == VERIFY_ACCEPTED) & fed).tolist()
    paired = dict(zip(pairing.candidate.tolist(), pairing.parent.tolist(), strict=True))
    assert {int(theirs[paired[row]]) for row in accepted} == {DECODE}
    assert len(pairing) == len(plain.table)


def test_acceptance_agrees_with_the_returned_tokens(speculating: Callable[..., Capture]) -> None:
    capture = speculating("eagle3")
    columns = capture.table.columns
    counts = kinds(capture)
    assert counts["verify-accepted"] > counts["verify-rejected"] / 3 > 0
    assert counts["draft-1"] > counts["draft-2"] == counts["draft-3"] > 0
    for index, name in enumerate(capture.requests):
        mine = (columns["request"] == index) & ~is_draft(columns)
        sampled = columns["sampled"][mine]
        assert sampled[sampled >= 0][: len(capture.outputs[name])].tolist() == capture.outputs[name]
        rejected = mine & (columns["kind"] == VERIFY_REJECTED)
        assert (columns["sampled"][rejected] == -1).all()
        assert (columns["kind"][mine] == PREFILL).sum() == len(capture.prompts[name])


def test_a_fault_in_the_draft_alone_is_named(
    speculating: Callable[..., Capture], overlay: Callable[[Fault], Path]
) -> None:
    candidate = speculating("eagle3", "-faulty-draft", overlay=overlay(in_draft()))
    result = diff(candidate, speculating("eagle3"))
    assert result.verdict == "diverged"
    assert result.first is not None
    assert result.first.site == "draft:model/hidden_states"
    assert result.first.segment.after == "draft:model.layers.8.self_attn.attn/output"
    assert result.tokens.requests_differ == 0
    target = [site for site in result.sites if not site.name.startswith("draft:")]
    assert all(site.rows_differ == 0 and site.rows_compared for site in target)


def test_a_fault_in_the_target_is_named_as_without_speculation(
    speculating: Callable[..., Capture], overlay: Callable[[Fault], Path]
) -> None:
    candidate = speculating("eagle3", "-faulty-target", overlay=overlay(in_layer(5)))
    first = diff(candidate, speculating("eagle3")).first
    assert first is not None
    assert first.segment.after == "model.layers.5.self_attn.attn/output"
    assert first.site == "model.layers.6.self_attn.attn/query"


@pytest.mark.slow
def test_compiled_eagle3(capturing: Capturing) -> None:
    options = {"engine": {"kv_cache_memory_bytes": 1 << 28}, "max_tokens": 12, **SPECULATION["eagle3"]}
    compiled = capturing("compiled-eagle3", **options)
    assert (compiled.complete, compiled.reasons) == (True, [])
    assert kinds(compiled)["draft-3"] > 0
