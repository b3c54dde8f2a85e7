"""The order of what is done between phases, on an LLM and workers that are only played."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from localizer.hooks.builders import Builders
from localizer.hooks.layout import CannotTap
from localizer.wire.spec import RunSpec

pytest.importorskip("torch")

from localizer.hooks import phases as module
from localizer.hooks.phases import Phases

ROUNDS = [["r00.00"], ["r01.00"], ["r02.00"], ["r03.00"], ["r04.00"], ["r05.00"], ["r06.00"], ["r07.00"]]


@dataclass
class PlayedLLM:
    """Keeps what was asked of it, in order; refuses the first `refusals` resets."""

    refusals: int = 0
    called: list[str] = field(default_factory=list)

    def collective_rpc(self, method: str) -> list[Any]:
        self.called.append(method.removeprefix("localizer_"))
        return [[{"target": "toy:f"}]]

    def reset_prefix_cache(self) -> bool:
        self.called.append("reset")
        self.refusals -= 1
        return self.refusals < 0


def walked(llm: PlayedLLM, rounds: int, **asked: object) -> Phases:
    """Go through all rounds, noting each in its place."""
    spec = RunSpec("m", {}, {}, [[1]], ROUNDS[:rounds], intervention=asked)
    course = Phases(llm, spec, lambda event, name: llm.called.append(name))
    for number, names in course.rounds():
        assert names == ROUNDS[number]
        llm.called.append(str(number))
    return course


def test_a_patch_stands_in_for_one_phase() -> None:
    llm = PlayedLLM()
    course = walked(llm, 6, kind="patch")
    assert " ".join(llm.called) == "prepare_change reset A1 0 1 reset change B 2 3 restore reset A2 4 5"
    assert [phase["name"] for phase in course.facts["phases"]] == ["A1", "B", "A2"]
    assert all(phase["reset"] is True and phase["tries"] == 1 for phase in course.facts["phases"])
    assert course.facts["workers"] == [[{"target": "toy:f"}]]


def test_the_prefix_cache_may_be_left() -> None:
    llm = PlayedLLM()
    course = walked(llm, 3, kind="attention-backend", keep_prefix_cache=True)
    assert " ".join(llm.called) == "prepare_change A1 0 change B 1 restore A2 2"
    assert {phase["reset"] for phase in course.facts["phases"]} == {None}


def test_only_b_begins_with_an_empty_cache() -> None:
    llm = PlayedLLM()
    course = walked(llm, 8, kind="prefix-cache")
    assert " ".join(llm.called) == "warm-up 0 1 A1 2 3 reset B 4 5 A2 6 7"
    assert course.facts["workers"] == []


def test_a_cache_that_is_not_reset_is_asked_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESET_SECONDS", 0)
    course = walked(PlayedLLM(refusals=2), 3, kind="patch")
    first = course.facts["phases"][0]
    assert (first["reset"], first["tries"]) == (True, 3)
    course = walked(PlayedLLM(refusals=10**6), 3, kind="patch")
    assert {(it["reset"], it["tries"]) for it in course.facts["phases"]} == {(False, module.RESET_TRIES)}


def test_builders_of_an_unknown_runner_are_refused() -> None:
    worker = SimpleNamespace(model_runner=SimpleNamespace(attn_groups=[]), vllm_config=None)
    with pytest.raises(CannotTap, match="SimpleNamespace has no kv_cache_config"):
        Builders(worker, lambda: True)


def test_builders_are_refused_where_graphs_hold_their_buffers() -> None:
    runner = SimpleNamespace(
        attn_groups=[], kv_cache_config=None, _kernel_block_sizes=[],
        initialize_attn_backend=None, initialize_metadata_builders=None,
    )  # fmt: skip
    mode = SimpleNamespace(cudagraph_mode=SimpleNamespace(name="PIECEWISE"))
    worker = SimpleNamespace(model_runner=runner, vllm_config=SimpleNamespace(compilation_config=mode))
    with pytest.raises(CannotTap, match="run without graphs"):
        Builders(worker, lambda: True)
