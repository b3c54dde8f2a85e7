"""The whole diff: properties that hold for any planted change."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from builders import Plan, attention, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localizer.diff import diff
from localizer.diff.result import Both
from localizer.diff.settings import differences
from localizer.report.text import render
from localizer.store.digest import XXH3
from localizer.store.dtypes import NUMPY
from localizer.store.reader import Capture
from localizer.wire.rowsum import ROWSUM

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


Parent = Callable[[str], Capture]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Parent:
    """The unchanged capture of a dtype, made once."""
    root = tmp_path_factory.mktemp("parents")
    return cache(lambda dtype: Capture(write(root, Plan(name=f"parent-{dtype}", dtype=dtype))))


def flip(index: Sequence[int], bit: int) -> object:
    def change(row: np.ndarray) -> np.ndarray:
        row = row.copy()
        word = row.view(np.dtype(f"u{row.dtype.itemsize}"))
        word[tuple(index)] ^= word.dtype.type(1 << bit)
        return row

    return change


@QUICK
@given(st.sampled_from([*FLOATS, "int32", "int8"]), st.data())
def test_a_single_flipped_bit_is_found_exactly_there(parent: Parent, dtype: str, data: st.DataObject) -> None:
    plan = Plan(dtype=dtype)
    site = data.draw(st.sampled_from([site for site in plan.sites() if site.shape]), label="site")
    request = data.draw(st.sampled_from(plan.requests), label="request")
    position = data.draw(st.integers(0 if site.rows == "all" else 2, 5), label="position")
    index = [data.draw(st.integers(0, size - 1)) for size in site.shape or ()]
    bit = data.draw(st.integers(0, 8 * NUMPY[dtype].itemsize - 1), label="bit")
    with tempfile.TemporaryDirectory() as folder:
        changed = replace(plan, changes={(request, position, site.name): flip(index, bit)})
        result = diff(Capture(write(Path(folder), changed)), parent(dtype))
    assert result.verdict == "diverged"
    assert result.first is not None
    found = result.first
    assert (found.request, found.position, found.site) == (request, position, site.name)
    assert (found.first_element, found.elements_differ) == (index, 1)
    assert [item.request for item in result.requests] == [request]
    assert {item.name: item.rows_differ for item in result.sites if item.rows_differ} == {site.name: 1}
    assert result.coverage.pairs.differ == 1


@QUICK
@given(
    st.sampled_from(FLOATS),
    st.lists(st.integers(1, 2), min_size=1, max_size=3),
    st.integers(1, 2),
    st.one_of(st.none(), st.integers(1, 3)),
    st.integers(1, 3),
)
def test_equal_work_gives_identical(
    dtype: str, matrix: list[int], repeats: int, chunk: int | None, layers: int
) -> None:
    plan = Plan(dtype=dtype, matrix=tuple(matrix), repeats=repeats, layers=layers, max_tokens=3)
    with tempfile.TemporaryDirectory() as folder:
        one = Capture(write(Path(folder), replace(plan, chunk=chunk)))
        other = Capture(write(Path(folder), replace(plan, name="parent")))
        result = diff(one, other)
    assert (result.verdict, result.first, result.reasons) == ("identical", None, [])
    assert result.coverage.rows.unpaired.candidate == result.coverage.rows.unpaired.parent == 0
    assert result.coverage.pairs.compared > 0


def test_a_capture_is_identical_to_itself(parent: Parent) -> None:
    assert diff(parent("bfloat16"), parent("bfloat16")).verdict == "identical"


def test_rows_of_another_batch_are_compared_by_prefix(tmp_path: Path) -> None:
    from builders import attention, bump

    plan = Plan(matrix=(2,))
    changes = {("r00.01", 4, attention(1, "query")): bump()}
    result = diff(
        Capture(write(tmp_path, replace(plan, changes=changes))),
        Capture(write(tmp_path, replace(plan, name="parent", matrix=(1, 2)))),
    )
    assert not result.workloads_equal
    assert result.coverage.rows.paired_by == "prefix"
    assert result.first is not None
    assert (result.first.request, result.first.parent_request) == ("r00.01", "r01.01")
    assert result.coverage.rows.unpaired.parent == 6


def test_many_shards_are_one_table(parent: Parent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from builders import attention, bump

    monkeypatch.setattr("localizer.store.writer.SHARD_ROWS", 4)
    changes = {("r01.01", 4, attention(1, "query")): bump((1, 1))}
    one = Capture(write(tmp_path, Plan(changes=changes)))
    monkeypatch.setattr("localizer.diff.compare.CHUNK_BYTES", 32 * 17 * 5)
    result = diff(one, parent("bfloat16"))
    assert len([file for file in one.files if "digests" in file.name]) > 2
    assert result.first is not None
    assert (result.first.request, result.first.position, result.first.first_element) == ("r01.01", 4, [1, 1])


def test_settings_that_differ_are_listed(tmp_path: Path) -> None:
    plan = Plan(
        name="parent", engine={"block_size": 16, "seed": 1}, overlay={"v1/a.py": "aa", "v1/b.py": "bb"}
    )
    other = Plan(
        engine={"block_size": 32, "seed": 1},
        environment={"VLLM_USE_X": "1"},
        overlay={"v1/a.py": "ac", "v1/b.py": "bb"},
        running={"cache": {"blocks": 7}},
        vllm="0.33.0",
    )
    found = differences(Capture(write(tmp_path, other)), Capture(write(tmp_path, plan)))
    assert {item.setting: (item.candidate, item.parent) for item in found} == {
        "source.vllm": ("0.33.0", "0.32.0"),
        "overlay.v1/a.py": ("ac", "aa"),
        "engine.block_size": (32, 16),
        "environment.VLLM_USE_X": ("1", None),
        "running.cache.blocks": (7, None),
    }


QUERY_2 = "model.layers.2.self_attn.attn/query"


def test_digests_of_different_algorithms_are_never_compared(tmp_path: Path) -> None:
    """A GPU hashed one side: where rows have no common algorithm nothing is said, neither equal nor not."""
    plan = Plan(payload=frozenset({attention(0, "query")}), changes={("r00.00", 3, QUERY_2): flip([0, 0], 0)})
    candidate = Capture(write(tmp_path, replace(plan, hashed=True)))
    parent = Capture(write(tmp_path, replace(plan, name="parent", changes={})))
    result = diff(candidate, parent, [Capture(write(tmp_path, replace(plan, name="parent", number=2)))])
    assert result.verdict == "identical"
    assert result.coverage.sites.shared == 2
    assert {item.name for item in result.sites} == {attention(0, "query"), "sampler/token"}
    reasons = result.coverage.sites.not_comparable
    assert reasons[QUERY_2] == Both(candidate=ROWSUM, parent=XXH3)
    assert len(reasons) + 2 == len(candidate.sites)
    stream = io.StringIO()
    render(result, stream)
    text = " ".join(stream.getvalue().split())
    assert f"not comparable: {len(reasons)} sites, whose digests are of {ROWSUM} and {XXH3}" in text
    assert f"Anything about {len(reasons)} sites that the captures hold digests of different" in text


def test_rows_that_a_gpu_hashed_are_compared(tmp_path: Path) -> None:
    plan = Plan(payload=frozenset(), hashed=True)
    changed = replace(plan, changes={("r00.00", 3, QUERY_2): flip([0, 0], 0)})
    one, other = (Capture(write(tmp_path, it)) for it in (changed, replace(plan, name="parent")))
    result = diff(one, other, explain=True)
    assert result.first is not None
    assert (result.first.site, result.first.position) == (QUERY_2, 3)
    assert not result.coverage.sites.not_comparable
    assert result.plan is not None
    assert result.plan.compare.digest == f"{ROWSUM} and {XXH3}"
    assert diff(other, other).verdict == "identical"
