"""Every pair of circumstances is captured whole, and one request's rows align through all of them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from engines import COMPILED, EAGER, IN_PROCESS, Capturing

from localizer.diff.align import align
from localizer.diff.pipeline import diff
from localizer.store.expected import is_draft
from localizer.store.reader import Capture
from localizer.store.schema import VERIFY_REJECTED

pytestmark = pytest.mark.engine

FACTORS: tuple[dict[str, dict[str, Any]], ...] = (
    {"eager": EAGER, "compiled": COMPILED},
    {"none": {}, "eagle3": {}, "ngram": {}},
    {"one-shot": {}, "chunked": {"max_num_batched_tokens": 128, "max_num_seqs": 128}},
    {"off": {"enable_prefix_caching": False}, "cold": {}, "warm": {}},
    {"in-process": {}, "multiprocess": {}},
)
"""Circumstances of a run, each with the engine arguments that make it so."""

ARRAY = (
    ("compiled", "none", "one-shot", "off", "multiprocess"),
    ("compiled", "eagle3", "chunked", "warm", "in-process"),
    ("compiled", "ngram", "one-shot", "cold", "in-process"),
    ("eager", "none", "chunked", "cold", "in-process"),
    ("eager", "none", "one-shot", "warm", "multiprocess"),
    ("eager", "eagle3", "one-shot", "off", "in-process"),
    ("eager", "eagle3", "chunked", "cold", "multiprocess"),
    ("eager", "ngram", "chunked", "off", "in-process"),
    ("eager", "ngram", "one-shot", "warm", "multiprocess"),
)
"""Runs in which each two circumstances of different factors meet at least once."""

SPECULATION: dict[str, dict[str, Any]] = {
    "none": {},
    "eagle3": {"speculative_model": "tiny-eagle3"},
    "ngram": {"speculative": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}},
}

LONG = {"prompt_tokens": 300, "max_tokens": 12, "payload": "all"}
"""Prompts of more than two KV blocks (128 tokens each) and of more than two chunks."""


def test_the_array_holds_every_pair() -> None:
    for (one, ours), (other, theirs) in combinations(enumerate(FACTORS), 2):
        wanted = {(a, b) for a in ours for b in theirs}
        assert wanted <= {(row[one], row[other]) for row in ARRAY}


def made(capturing: Capturing, row: tuple[str, ...], **options: Any) -> Capture:
    """The capture of a row of the array: three requests, once; twice where the cache is to be warm."""
    _, speculation, _, cache, process = row
    engine = {
        key: value for factor, level in zip(FACTORS, row, strict=True) for key, value in factor[level].items()
    }
    settings = {"matrix": "1,2", "repeats": 2 if cache == "warm" else 1} | LONG | SPECULATION[speculation]
    if cache == "cold":
        settings["matrix"] = "3"
    return capturing(
        "pairwise-" + "-".join([*row, *options]),
        engine=engine,
        environment=IN_PROCESS if process == "in-process" else {},
        **(settings | options),
    )


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id="-".join(row),
            marks=[] if row[0] == "eager" and row[4] == "in-process" else [pytest.mark.slow],
        )
        for row in ARRAY
    ],
)
def test_each_run_holds_every_row_and_checks_itself(capturing: Capturing, row: tuple[str, ...]) -> None:
    capture = made(capturing, row)
    assert (capture.complete, capture.reasons) == (True, [])
    assert capture.manifest is not None
    counts, cached = capture.manifest.counts, [output.cached_tokens for output in capture.manifest.outputs]
    assert (counts["rows_without_prefix"], counts["prompt_mismatches"]) == (0, 0)
    assert all(rows.recorded == rows.expected > 0 for rows in capture.manifest.coverage.values())
    assert (max(cached) > 0) == (row[3] == "warm")
    assert bool(is_draft(capture.table.columns).any()) == (row[1] == "eagle3")
    result = diff(capture, made(capturing, ("eager", "none", "one-shot", "off", "in-process")))
    assert result.verdict in ("identical", "diverged")
    assert (result.first is None) == (result.verdict == "identical")


ONE = ("eager", "none", "one-shot", "off", "in-process")
WAYS: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "alone": (ONE, {"matrix": "1"}, "r00.00"),
    "batch of eight": (ONE, {"matrix": "8"}, "r00.00"),
    "chunked": (("eager", "none", "chunked", "off", "in-process"), {"matrix": "1"}, "r00.00"),
    "cached": (("eager", "none", "one-shot", "warm", "in-process"), {"matrix": "1"}, "r01.00"),
    "speculated": (("eager", "eagle3", "one-shot", "off", "in-process"), {"matrix": "1"}, "r00.00"),
}
"""Ways to compute the same request: the run, and which of its requests it is."""


def prefixes(capture: Capture, request: str, positions: range) -> list[bytes]:
    """The prefix of a request's row at each position: of the one row there that no verification rejected."""
    columns = capture.table.columns
    mine = columns["request"] == capture.requests.index(request)
    mine &= ~is_draft(columns) & (columns["kind"] != VERIFY_REJECTED)
    rows = [np.flatnonzero(mine & (columns["position"] == position)) for position in positions]
    assert all(len(found) == 1 for found in rows)
    return [capture.table.prefix[found[0]].tobytes() for found in rows]


@pytest.mark.parametrize(("one", "other"), list(combinations(WAYS, 2)))
def test_one_request_aligns_whichever_way_it_was_computed(capturing: Capturing, one: str, other: str) -> None:
    ours, theirs = (made(capturing, row, **options) for row, options, _ in (WAYS[one], WAYS[other]))
    here, there = WAYS[one][2], WAYS[other][2]
    tokens = list(zip(ours.outputs[here], theirs.outputs[there], strict=True))
    same = next((at for at, (a, b) in enumerate(tokens) if a != b), len(tokens) - 1)  # the last is not fed
    positions = range(256 if "cached" in (one, other) else 0, LONG["prompt_tokens"] + same)
    assert prefixes(ours, here, positions) == prefixes(theirs, there, positions)
    pairing = align(ours, theirs)
    for rows in (pairing.candidate, pairing.parent):
        assert len(np.unique(rows)) == len(rows) >= len(positions)
    result = diff(ours, theirs)
    assert result.verdict in ("identical", "diverged")
    assert (result.first is not None) == (result.verdict == "diverged")
    assert result.coverage.pairs.compared >= len(positions) * 32  # four sites of eight layers
