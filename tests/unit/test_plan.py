"""From what people type to a workload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localizer.errors import LocalizerError
from localizer.store.schema import rounds
from localizer.workload.plan import (
    COMMON_VOCABULARY,
    MATRIX,
    draw_prompts,
    greedy,
    parse_matrix,
    parse_pairs,
    vocabulary,
)


def test_matrices() -> None:
    assert parse_matrix(MATRIX) == [1, 2, 4, 8, 4, 2, 1]
    assert parse_matrix(" 3 ") == [3]


@pytest.mark.parametrize("text", ["", "0", "1,0", "-1", "1,,2", "1;2", "one", "1.5", "1,", "9" * 5000])
def test_what_is_no_matrix(text: str) -> None:
    with pytest.raises(LocalizerError, match="is not a list of batch sizes; give positive whole numbers"):
        parse_matrix(text)


def test_rounds_name_their_requests() -> None:
    assert rounds([1, 2], 2) == [["r00.00"], ["r01.00", "r01.01"], ["r02.00"], ["r03.00", "r03.01"]]


@given(st.integers(0, 20), st.integers(1, 4), st.integers(20, 1000), st.integers(0, 2**40))
def test_prompts_are_distinct_and_depend_on_seed_and_index_alone(
    count: int, length: int, size: int, seed: int
) -> None:
    prompts = draw_prompts(count, length, size, seed)
    assert len({tuple(prompt) for prompt in prompts}) == count
    assert all(len(prompt) == length and 0 <= min(prompt) <= max(prompt) < size for prompt in prompts)
    assert draw_prompts(count // 2, length, size, seed) == prompts[: count // 2]


def test_the_same_seed_gives_these_prompts_for_ever() -> None:
    assert draw_prompts(2, 4, 1000, 0) == [[850, 636, 511, 269], [522, 889, 992, 557]]


def test_as_many_prompts_as_there_are() -> None:
    assert sorted(draw_prompts(40, 1, 40, 0)) == [[token] for token in range(40)]
    assert len(draw_prompts(3, 100_000, 2, 0)) == 3
    with pytest.raises(LocalizerError, match="no 41 distinct prompts of 1 tokens; ask for longer prompts"):
        draw_prompts(41, 1, 40, 0)
    with pytest.raises(LocalizerError, match="no 2 distinct prompts"):
        draw_prompts(2, 100, 1, 0)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"vocab_size": 1024}, 1024),
        ({"text_config": {"vocab_size": 99}}, 99),
        ({"vocab_size": None, "text_config": {"vocab_size": 99}}, 99),
        ({"vocab_size": 0}, COMMON_VOCABULARY),
        ({"vocab_size": -5}, COMMON_VOCABULARY),
        ({"vocab_size": "many"}, COMMON_VOCABULARY),
        ({"text_config": "none"}, COMMON_VOCABULARY),
        ({}, COMMON_VOCABULARY),
        ([], COMMON_VOCABULARY),
        (None, COMMON_VOCABULARY),
    ],
)
def test_vocabulary(tmp_path: Path, config: object, size: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocabulary(tmp_path) == size


def test_vocabulary_of_a_model_that_is_not_local(tmp_path: Path) -> None:
    assert vocabulary(Path("org/model")) == COMMON_VOCABULARY
    (tmp_path / "config.json").write_text("{")
    assert vocabulary(tmp_path) == COMMON_VOCABULARY


def test_greedy() -> None:
    assert greedy(7) == {"temperature": 0.0, "max_tokens": 7, "ignore_eos": True, "detokenize": False}


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("a=true", True),
        ("a=1", 1),
        ("a=1e-3", 0.001),
        ("a=auto", "auto"),
        ("a=", ""),
        ("a=b=c", "b=c"),
        ('a={"mode": 3}', {"mode": 3}),
        ('a="1"', "1"),
        ("a=" + "[" * 100_000, "[" * 100_000),
        ("a=" + "9" * 5000, "9" * 5000),
    ],
)
def test_values_are_json_where_they_can_be(pair: str, value: object) -> None:
    assert parse_pairs([pair], "--engine", values=True) == {"a": value}
    assert parse_pairs([pair], "--env", values=False) == {"a": pair.removeprefix("a=")}


@pytest.mark.parametrize("pair", ["a", "", "=1", "="])
def test_what_is_no_pair(pair: str) -> None:
    with pytest.raises(LocalizerError, match=r"--engine .* is not KEY=VALUE"):
        parse_pairs(["b=1", pair], "--engine", values=True)


def test_the_last_of_equal_keys_counts() -> None:
    assert parse_pairs(["a=1", "b=2", "a=3"], "--engine", values=True) == {"a": 3, "b": 2}
