"""The specification survives its file, and layer selections mean what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localizer.wire.spec import INPUT_IDS, LOGITS, POSITIONS, RunSpec, kept_sites, parse_indices


def test_what_is_written_is_read(tmp_path: Path) -> None:
    spec = RunSpec(
        model="org/model",
        engine={"enforce_eager": True, "compilation_config": {"mode": 3}},
        sampling={"temperature": 0.0},
        prompts=[[1, 2], [3, 4]],
        rounds=[["r00.00"], ["r01.00", "r01.01"]],
        layers="0,2-3",
        taps=False,
        rings=["/proc/1/fd/3", "/proc/1/fd/4"],
        writer_pids=[2, 5],
        parent_pid=1,
    )
    spec.write(tmp_path / "run.json")
    assert RunSpec.read(tmp_path / "run.json") == spec


@pytest.mark.parametrize(
    ("text", "count", "chosen"),
    [
        ("all", 3, [0, 1, 2]),
        ("all", 0, []),
        ("first", 3, [0]),
        ("first", 0, []),
        ("0,5-9", 10, [0, 5, 6, 7, 8, 9]),
        (" 2 , 1", 3, [1, 2]),
        ("1-2,2-3,2", 4, [1, 2, 3]),
    ],
)
def test_selections(text: str, count: int, chosen: list[int]) -> None:
    assert parse_indices(text, count) == chosen


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "neither an index"),
        ("last", "neither an index"),
        ("1,", "neither an index"),
        ("-1", "neither an index"),
        ("1-", "neither an index"),
        ("1-2-3", "neither an index"),
        ("²", "neither an index"),
        ("1.5", "neither an index"),
        ("3-2", "backwards"),
        ("0-8", "no layer 8 to tap; the model has 8"),
        ("99999999999-999999999999", "no layer"),
    ],
)
def test_malformed_selections_say_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_indices(text, 8)


@given(st.sets(st.integers(0, 30), min_size=1))
def test_any_set_of_indices_can_be_named(indices: set[int]) -> None:
    assert parse_indices(",".join(map(str, indices)), 31) == sorted(indices)


def test_whose_rows_are_kept() -> None:
    layers = [
        f"model.layers.{layer}.self_attn.attn/{kind}" for layer in (3, 4) for kind in ("query", "output")
    ]
    sites = [*((name, "all") for name in (INPUT_IDS, POSITIONS, *layers)), (LOGITS, "logits")]
    assert kept_sites(sites, "all") is None
    assert kept_sites(sites, "none") == frozenset()
    assert kept_sites(sites, "first") == frozenset(layers[:2])
    assert kept_sites(sites[:2], "first") == frozenset()
