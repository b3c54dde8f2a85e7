"""Names of the sites of several workers are composed and taken apart again; shares of heads are vLLM's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localizer.wire.ranks import Naming, Part, base, matches, parse, share
from localizer.wire.spec import HIDDEN, kept_sites

QUERY = "model.layers.0.self_attn.attn/query"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (f"{QUERY}[0/2]", Part(QUERY, 0, 2)),
        (f"{QUERY}[1/2]@3", Part(QUERY, 1, 2, 3)),
        ("model/hidden_states@1", Part(HIDDEN, rank=1)),
        ("model/auxiliary_hidden_states/0@1", Part("model/auxiliary_hidden_states/0", rank=1)),
        ("draft:model/input_ids@1", Part("draft:model/input_ids", rank=1)),
        ("l.attn/latent@0/2", Part("l.attn/latent", rank=0, ranks=2)),
        # of one worker, whatever they look like
        (QUERY, Part(QUERY)),
        ("model.layers.0.mlp@2", Part("model.layers.0.mlp@2")),
        ("model.layers.0.mlp@2/1", Part("model.layers.0.mlp@2/1")),
        ("model.layers.0.mlp/1", Part("model.layers.0.mlp/1")),
        ("l/query[2/2]", Part("l/query[2/2]")),
        ("l/query[0/1]", Part("l/query[0/1]")),
        ("l/query[00/2]", Part("l/query[00/2]")),
        ("l/query@2/2", Part("l/query@2/2")),
        ("l/query[0/99999]", Part("l/query[0/99999]")),
        ("l/query[٠/2]", Part("l/query[٠/2]")),
        ("", Part("")),
        ("/", Part("/")),
    ],
)
def test_names_are_taken_apart(name: str, part: Part) -> None:
    assert parse(name) == part
    assert part.name == name


@given(
    st.text(st.characters(exclude_characters="/@[]\n"), min_size=1),
    st.integers(0, 7),
    st.integers(1, 8),
    st.none() | st.integers(0, 9),
    st.sampled_from((0, 10)),
)
def test_what_is_composed_is_taken_apart(
    part: str, index: int, of: int, rank: int | None, ranks: int
) -> None:
    made = Part(f"model.layers.0.attn/{part}", index % of, of, rank, ranks if rank is not None else 0)
    assert parse(made.name) == made


@given(st.text())
def test_any_name_is_a_base_with_an_end(name: str) -> None:
    assert parse(name).name == name
    assert name.startswith(base(name))


@pytest.mark.parametrize(
    ("heads", "rank", "ranks", "held"),
    [
        ((4, 2), 0, 2, (0, 2, False)),
        ((4, 2), 1, 2, (1, 2, False)),
        ((1, 1), 1, 2, (0, 1, True)),  # one key head, which both ranks hold
        ((2, 1), 0, 4, (0, 2, False)),
        ((2, 1), 1, 4, (0, 2, True)),
        ((2, 1), 2, 4, (1, 2, False)),
        ((2, 1), 3, 4, (1, 2, True)),
        ((4, 3), 0, 2, None),
        ((4, 0), 0, 2, None),
        ((6, 2), 0, 2, None),
    ],
)
def test_shares_of_heads(
    heads: tuple[int, int], rank: int, ranks: int, held: tuple[int, int, bool] | None
) -> None:
    assert share(*heads, rank, ranks) == held


def test_sites_of_a_worker() -> None:
    heads = {QUERY: (1, 2, False), "l/key": (0, 1, True), "l/latent": None}
    naming = Naming(1, 2, heads)
    assert [naming(site) for site in (QUERY, "l/key", "l/latent", HIDDEN)] == [
        f"{QUERY}[1/2]",
        "l/key@1",
        "l/latent@1/2",
        f"{HIDDEN}@1",
    ]
    assert Naming(0, 2)(HIDDEN) == HIDDEN
    assert Naming()(QUERY) == QUERY


@pytest.mark.parametrize("pattern", ["*/query", QUERY, f"{QUERY}[[]1/2]", f"{QUERY}[1/2]", "*"])
def test_patterns_match_with_and_without_the_end(pattern: str) -> None:
    assert matches(f"{QUERY}[1/2]", pattern)
    assert not matches("model/positions@1", "*/query")


def test_the_first_layer_is_kept_on_each_rank() -> None:
    sites = [
        ("model/input_ids@1", "all"),
        ("a/query[1/2]", "all"),
        ("a/key@1", "all"),
        ("b/query[1/2]", "all"),
    ]
    assert kept_sites(sites, "first") == {"a/query[1/2]", "a/key@1"}
