"""What a worker of several holds is told by its layers and its configuration; both are doubled here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from notes import Notes  # noqa: E402

from localizer.hooks.boundaries import Boundary  # noqa: E402 - needs torch
from localizer.hooks.layout import CannotTap  # noqa: E402
from localizer.hooks.ranks import GATHERED, gathered_elsewhere, naming  # noqa: E402
from localizer.hooks.recorder import Recorder  # noqa: E402
from localizer.wire.ranks import Naming  # noqa: E402
from localizer.wire.spec import INPUT_IDS, LATENT_KINDS, LOGITS, SITE_KINDS, TOKEN  # noqa: E402


def model(queries: int | None = 8, pairs: int = 2) -> SimpleNamespace:
    text = SimpleNamespace(num_attention_heads=queries)
    return SimpleNamespace(hf_text_config=text, get_total_num_kv_heads=lambda: pairs)


def config(rank: int, ranks: int, draft_ranks: int | None = None, **heads: Any) -> SimpleNamespace:
    speculative = None
    if draft_ranks is not None:
        parallel = SimpleNamespace(tensor_parallel_size=draft_ranks)
        speculative = SimpleNamespace(draft_model_config=model(4, 4), draft_parallel_config=parallel)
    return SimpleNamespace(
        model_config=model(**heads),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=ranks),
        speculative_config=speculative,
    )


def layer(queries: int, pairs: int, name: str = "a") -> Boundary:
    return Boundary(name, SimpleNamespace(num_heads=queries, num_kv_heads=pairs), (), SITE_KINDS, heads=True)


def names(found: Naming, layer: str = "a") -> list[str]:
    return [name for part in SITE_KINDS for name in found.names(f"{layer}/{part}")]


@pytest.mark.parametrize(
    ("rank", "ranks", "heads", "said"),
    [
        (0, 2, (4, 1), ["a/query[0/2]", "a/key[0/2]", "a/value[0/2]", "a/output[0/2]"]),
        (1, 2, (4, 1), ["a/query[1/2]", "a/key[1/2]", "a/value[1/2]", "a/output[1/2]"]),
        (1, 4, (2, 1), ["a/query[1/4]", "a/key[0/2]@1", "a/value[0/2]@1", "a/output[1/4]"]),
        (2, 4, (2, 1), ["a/query[2/4]", "a/key[1/2]", "a/value[1/2]", "a/output[2/4]"]),
        (0, 1, (8, 2), ["a/query", "a/key", "a/value", "a/output"]),
        # heads that are not what the configuration says: nobody knows which part they are
        (1, 2, (8, 1), ["a/query@1/2", "a/key[1/2]", "a/value[1/2]", "a/output@1/2"]),
        (0, 2, (4, 2), ["a/query[0/2]", "a/key@0/2", "a/value@0/2", "a/output[0/2]"]),
    ],
)
def test_ordinary_attention(rank: int, ranks: int, heads: tuple[int, int], said: list[str]) -> None:
    assert names(naming(config(rank, ranks), [layer(*heads)], [])) == said


def test_other_layers_hold_what_nobody_knows() -> None:
    latent = Boundary("a", SimpleNamespace(num_heads=4, num_kv_heads=1), (), LATENT_KINDS)
    found = naming(config(0, 2), [latent], [])
    assert [found(f"a/{part}") for part in LATENT_KINDS] == [f"a/{part}@0/2" for part in LATENT_KINDS]


def test_a_model_without_one_number_of_heads() -> None:
    found = naming(config(1, 2, queries=None), [layer(4, 1)], [])
    assert names(found)[0] == "a/query@1/2"


def test_a_part_that_a_layer_does_not_have_is_named_like_the_others() -> None:
    shared = Boundary(
        "a",
        SimpleNamespace(num_heads=4, num_kv_heads=1),
        (),
        ("query", "output"),
        {"key": "shared", "value": "shared"},
        heads=True,
    )
    assert names(naming(config(1, 2), [shared], [])) == [f"a/{part}[1/2]" for part in SITE_KINDS]


@pytest.mark.parametrize(
    ("draft_ranks", "heads", "said"), [(2, 2, "draft:d/query[1/2]"), (1, 4, "draft:d/query@1")]
)
def test_a_draft_may_be_whole_on_each_rank(draft_ranks: int, heads: int, said: str) -> None:
    found = naming(config(1, 2, draft_ranks), [], [layer(heads, heads, "d")])
    assert found("draft:d/query") == said


def test_logits_that_another_rank_gathers() -> None:
    class Gathers(torch.nn.Module):
        use_all_gather = False

    double = torch.nn.Sequential(Gathers())
    assert gathered_elsewhere(double, Naming(1, 2)) == {LOGITS: GATHERED, TOKEN: GATHERED}
    assert gathered_elsewhere(double, Naming(0, 2)) == {}
    assert gathered_elsewhere(torch.nn.Sequential(), Naming(1, 2)) == {}


@pytest.mark.parametrize(
    ("ranks", "heads", "split", "said"),
    [
        (1, (8, 2), 2, ["query[0/2]", "query[1/2]", "key[0/2]", "key[1/2]"]),
        (1, (8, 2), 4, ["query[0/4]", "query[1/4]", "query[2/4]", "query[3/4]", "key[0/2]", "key[1/2]"]),
        (2, (4, 1), 2, ["query[1/2]", "key[1/2]"]),
        (2, (4, 1), 4, ["query[2/4]", "query[3/4]", "key[1/2]"]),
    ],
)
def test_ranges_of_more_workers(ranks: int, heads: tuple[int, int], split: int, said: list[str]) -> None:
    found = naming(config(ranks - 1, ranks), [layer(*heads)], [], split)
    there = [name for part in ("query", "key") for name in found.names(f"a/{part}")]
    assert there == [f"a/{name}" for name in said]


@pytest.mark.parametrize(("ranks", "heads", "split"), [(1, (8, 2), 3), (2, (4, 1), 3), (1, (7, 2), 2)])
def test_ranges_that_there_cannot_be(ranks: int, heads: tuple[int, int], split: int) -> None:
    with pytest.raises(CannotTap, match=rf"{split} workers could not share the heads of a/"):
        naming(config(0, ranks), [layer(*heads)], [], split)


def test_the_recorder_records_ranges() -> None:
    notes = Notes()
    recorder = Recorder(notes)  # type: ignore[arg-type]
    recorder.naming = naming(config(0, 1), [layer(8, 2)], [], 2)
    recorder.register([(INPUT_IDS, "all"), ("a/query", "all"), ("a/output", "all"), ("z", "all")], {}, {})
    recorder.add("late", "all")
    assert notes.names == [
        *(INPUT_IDS, "a/query[0/2]", "a/query[1/2]", "a/output[0/2]", "a/output[1/2]", "z", "late"),
    ]
    recorder._rows = 2
    query, output = torch.arange(2 * 8 * 3.0).view(2, 8, 3), torch.arange(2 * 24.0).view(2, 24)
    recorder.tap(["a/query", "a/output"])(query, output)
    recorder.tap(["z", "a/query", "not/known"])(output, None, output)
    recorder.rows("late", output)
    assert [name for name, _ in notes.taken] == [
        *("a/query[0/2]", "a/query[1/2]", "a/output[0/2]", "a/output[1/2]", "z", "late"),
    ]
    taken = dict(notes.taken)
    assert torch.equal(torch.cat([taken["a/query[0/2]"], taken["a/query[1/2]"]], 1), query)
    assert torch.equal(torch.cat([taken["a/output[0/2]"], taken["a/output[1/2]"]], 1), output)
    notes.taken.clear()
    recorder.stack(["a/query", "a/query"])(torch.stack([query, query + 1]))
    assert [name for name, _ in notes.taken] == ["a/query[0/2]", "a/query[1/2]"] * 2
    assert torch.equal(notes.taken[3][1], query[:, 4:] + 1)
    assert not recorder.unkept("first")(1)
    assert recorder.unkept("none")(1)
    assert recorder.unkept("first")(5)
    recorder.tap(["a/query"])(torch.zeros(2, 3, 1))
    assert "has no 2 ranges" in recorder.errors[0]


def test_a_worker_announces_its_own_names() -> None:
    notes = Notes()
    recorder = Recorder(notes)  # type: ignore[arg-type]
    recorder.naming = naming(config(1, 2), [layer(4, 1)], [])
    recorder.register([("a/query", "all"), ("model/hidden_states", "logits")], {"a/key": "why"}, {})
    assert notes.names == ["a/query[1/2]", "model/hidden_states@1"]
    assert notes.absent == {"a/key[1/2]": "why"}
    assert recorder.knows("a/query")
