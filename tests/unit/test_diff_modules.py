"""Segments that end at modules, experts, a state space or latent attention, and how they are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from builders import Plan, attention, bump, pair

from localizer.diff import diff
from localizer.diff.places import key_value_sites, place, taken_in
from localizer.diff.result import Finding, Segment
from localizer.report.scope import does_not_establish
from localizer.report.wording import blame, code
from localizer.store.reader import Capture

LAYER = "model.layers.1"
MODULES = (
    ".self_attn.o_proj", "/residual_after_attention", ".post_attention_layernorm", ".mlp.down_proj",
    ".mlp", "/residual",
)  # fmt: skip
EXPERTS = tuple(
    f".mlp.experts/{part}"
    for part in ("hidden_states", "router_logits", "expert_weights", "expert_ids", "shared_output", "output")
)
STATE_SPACE = (".mixer.in_proj", ".mixer/projected_states", ".mixer/output", ".mixer.norm")
LATENT = (".other/query", ".other/latent", ".other/key_rope", ".other/output")


Making = Callable[[tuple[str, ...], str], Finding]


@pytest.fixture
def first(tmp_path: Path) -> Making:
    """The first difference where one site differs, of captures whose layer 1 has further sites."""

    def work(ends: tuple[str, ...], site: str) -> Finding:
        parent = Plan(after_attention=ends)
        one, other = pair(tmp_path, parent, changes={("r01.01", 4, site): bump()})
        result = diff(Capture(one), Capture(other)).first
        assert result is not None
        assert result.site == site
        return result

    return work


@pytest.mark.parametrize(
    ("ends", "end", "after", "blamed", "told"),
    [
        (MODULES, ".self_attn.o_proj", attention(1, "output"), "code-between",
         "The output of model.layers.1.self_attn.o_proj differs, the attention output of layer 1 is equal: "
         "the code between the attention output of layer 1 and the output of "
         "model.layers.1.self_attn.o_proj: "
         "model.layers.1.self_attn.o_proj itself; or what is computed between the two in the code that calls "
         "them."),
        (MODULES, "/residual_after_attention", f"{LAYER}.self_attn.o_proj", "code-between",
         "The residual after attention of model.layers.1 differs, the output of "
         "model.layers.1.self_attn.o_proj is equal: the code between the "
         "output of model.layers.1.self_attn.o_proj and the residual after "
         "attention of model.layers.1: what makes that residual after attention; or what is computed between "
         "the two in the code that calls them."),
        (MODULES, ".post_attention_layernorm", f"{LAYER}/residual_after_attention", "code-between", None),
        (MODULES, ".mlp.down_proj", f"{LAYER}.post_attention_layernorm", "code-between", None),
        (MODULES, "/residual", f"{LAYER}.mlp", "code-between", None),
        (EXPERTS, ".mlp.experts/hidden_states", attention(1, "output"), "code-between", None),
        (EXPERTS, ".mlp.experts/router_logits", attention(1, "output"), "code-between", None),
        (EXPERTS, ".mlp.experts/expert_ids", f"{LAYER}.mlp.experts/router_logits", "router",
         "The expert ids of experts of layer 1 differ, the router logits of experts of layer 1 are equal: "
         "the router, which chooses the experts."),
        (EXPERTS, ".mlp.experts/output", f"{LAYER}.mlp.experts/expert_ids", "experts",
         "The output of experts of layer 1 differs, the expert ids of experts of layer 1 are equal: the "
         "experts, or how what they give is combined."),
        (STATE_SPACE, ".mixer/projected_states", f"{LAYER}.mixer.in_proj", "code-between", None),
        (STATE_SPACE, ".mixer/output", f"{LAYER}.mixer/projected_states", "state-space",
         "The output of mixer of layer 1 differs, the projected states of mixer of layer 1 are equal: the "
         "state-space op, its metadata or the state that it carried on."),
        (STATE_SPACE, ".mixer.norm", f"{LAYER}.mixer/output", "code-between", None),
        (LATENT, ".other/latent", attention(1, "output"), "code-between", None),
        (LATENT, ".other/output", f"{LAYER}.other/key_rope", "attention", None),
    ],
)  # fmt: skip
def test_the_segment_of_a_site_inside_a_layer(
    first: Making, ends: tuple[str, ...], end: str, after: str, blamed: str, told: str | None
) -> None:
    finding = first(ends, LAYER + end)
    assert (finding.segment.after, finding.blame) == (after, blamed)
    assert (finding.unobserved.layers, finding.unobserved.sites) == ([], [])
    if told is not None:
        assert blame(finding) == told


def test_key_and_value_rows_of_latent_attention_are_looked_at(first: Making) -> None:
    finding = first(LATENT, f"{LAYER}.other/output")
    assert finding.key_value is not None
    assert (finding.key_value.positions, finding.key_value.equal, finding.key_value.differ) == (4, 4, 0)


def test_a_state_space_and_experts_have_no_key_and_value_rows(first: Making) -> None:
    assert first(STATE_SPACE, f"{LAYER}.mixer/output").key_value is None


def test_the_query_after_modules_follows_the_last_of_them(first: Making) -> None:
    finding = first(MODULES, attention(2, "query"))
    assert finding.segment.after == f"{LAYER}/residual"
    assert blame(finding) == (
        "The query of layer 2 differs, the residual of model.layers.1 is equal: the code between the "
        "residual of model.layers.1 and the query of layer 2."
    )


@pytest.mark.parametrize(
    ("name", "stage", "layer", "part", "number"),
    [
        ("model.layers.3.mlp", "module", "model.layers.3.mlp", "", 3),
        ("model.layers.3.mlp@2", "module", "model.layers.3.mlp@2", "", 3),
        ("model.layers.3.x/1", "module", "model.layers.3.x", "1", 3),
        ("model.layers.3/residual", "module", "model.layers.3", "residual", 3),
        ("model.layers.3.rotary_emb/rotated_key", "module", "model.layers.3.rotary_emb", "rotated_key", 3),
        ("model.norm", "module", "model.norm", "", None),
        ("draft:model.norm", "module", "draft:model.norm", "", None),
        ("model.layers.3.mlp.experts/expert_ids", "routing", "model.layers.3.mlp.experts", "expert_ids", 3),
        ("model.layers.3.mixer/projected_states", "qkv", "model.layers.3.mixer", "projected_states", 3),
        ("model/hidden_states", "hidden", "", "hidden_states", None),
        ("model.layers.0/anything", "other", "", "anything", None),
    ],
)
def test_names_are_taken_apart(name: str, stage: str, layer: str, part: str, number: int | None) -> None:
    where = place(name)
    assert (where.stage, where.layer, where.part, where.number) == (stage, layer, part, number)


def test_what_an_op_takes_in_is_told_by_the_sites_of_its_layer() -> None:
    experts = [f"l{end}" for end in EXPERTS]

    def takes(layer: str, names: list[str]) -> list[str]:
        return taken_in(place(f"{layer}/output"), names, {})

    def caches(layer: str, names: list[str]) -> list[str]:
        return key_value_sites(place(f"{layer}/output"), names, {})

    experts_own = [f"l.mlp.experts/{part}" for part in ("query", "key", "value")]
    assert takes("l.mlp.experts", experts[-2:]) == experts_own
    assert takes("l.mlp.experts", experts) == experts[:4]
    assert caches("l.mlp.experts", experts) == []
    assert takes("a", ["a/latent"]) == ["a/query", "a/latent", "a/key_rope"]
    assert caches("a", ["a/latent"]) == ["a/latent", "a/key_rope"]
    assert caches("a", ["a/query"]) == ["a/key", "a/value"]
    assert caches("a", ["a/projected_states"]) == []


@pytest.mark.parametrize(("layer", "open_question"), [(1, True), (2, False)])
def test_a_residual_stream_speaks_only_for_what_is_after_it(
    tmp_path: Path, layer: int, open_question: bool
) -> None:
    parent = Plan(after_attention=MODULES)  # in layer 1
    one, other = pair(tmp_path, parent, changes={("r01.01", 4, attention(layer, "query")): bump()})
    said = does_not_establish(diff(Capture(one), Capture(other)))
    assert any("the residual stream was not compared" in sentence for sentence in said) is open_question


def test_ends_of_one_place_in_the_source_are_told_once() -> None:
    place_of_both = "vllm/model_executor/models/llama.py:232 LlamaAttention.forward"
    segment = Segment(
        after=attention(1, "output"),
        before=attention(2, "query"),
        after_code=place_of_both,
        before_code=place_of_both,
        code_of="candidate",
    )
    assert code(segment) == f"In the candidate's source both of its ends are at {place_of_both}."
