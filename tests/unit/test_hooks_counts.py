"""Metadata builds and forwards are counted in real steps, of the target and of the draft."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from localizer.hooks import counts


class Builder:
    """Builds for a draft by building as for the target, as vLLM's builders do unless they know better."""

    def __init__(self) -> None:
        self.fails = False

    def build(self, *args: Any, **kwargs: Any) -> str:
        if self.fails:
            raise RuntimeError("no metadata")
        return "built"

    def build_for_drafting(self, *args: Any) -> str:
        return self.build(0, fast_build=True) + " for drafting"


class State:
    """Where a step is: the part of a recorder that is asked."""

    def __init__(self) -> None:
        self.in_forward = self.recording = False
        self.errors: list[str] = []
        self.replays: Counter[str] = Counter()


def group(*builders: Builder) -> SimpleNamespace:
    return SimpleNamespace(metadata_builders=list(builders))


def test_builds() -> None:
    state, target, draft = State(), Builder(), Builder()
    runner = SimpleNamespace(
        attn_groups=[[group(target)], []], drafter=SimpleNamespace(draft_attn_groups=[group(draft)])
    )
    counting, undo = counts.Counts(state, runner), ExitStack()  # type: ignore[arg-type]
    for _ in range(2):  # as at the beginning of every round
        counting.follow_builders(undo)
    target.build()  # outside of steps
    state.in_forward = True
    assert target.build(1, common=2) == "built"
    state.in_forward, state.recording = False, True
    assert [draft.build_for_drafting(), draft.build_for_drafting()] == ["built for drafting"] * 2
    draft.fails = True
    with pytest.raises(RuntimeError, match="no metadata"):
        draft.build_for_drafting()
    state.recording, state.in_forward = False, True
    target.build()
    assert counting.found == {"target_metadata_builds": 2, "draft_metadata_builds": 3}
    undo.close()
    target.build()
    assert counting.found["target_metadata_builds"] == 2
    assert "build" not in vars(target)


def test_builders_that_are_made_anew_are_followed() -> None:
    state, old, new = State(), Builder(), Builder()
    runner = SimpleNamespace(attn_groups=[[group(old)]])
    counting, undo = counts.Counts(state, runner), ExitStack()  # type: ignore[arg-type]
    counting.follow_builders(undo)
    runner.attn_groups = [[group(new)]]
    counting.follow_builders(undo)
    state.in_forward = True
    new.build()
    assert counting.found == {"target_metadata_builds": 1}  # there is no draft


def test_forwards_by_graph_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextmanager
    def enter(context: Any) -> Any:
        entered.append(context)
        yield

    played = ModuleType("vllm")
    played.forward_context = SimpleNamespace(override_forward_context=enter)  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "vllm", played)
    state = State()
    counting, undo = counts.Counts(state, SimpleNamespace()), ExitStack()  # type: ignore[arg-type]
    counting.follow(undo)

    def forward(mode: str) -> None:
        context = SimpleNamespace(cudagraph_runtime_mode=SimpleNamespace(name=mode))
        with played.forward_context.override_forward_context(context):
            assert entered[-1] is context

    forward("NONE")  # of a dummy
    state.in_forward = True
    forward("FULL"), forward("FULL"), forward("PIECEWISE")
    with played.forward_context.override_forward_context(None):
        pass
    state.in_forward, state.recording = False, True
    forward("NONE")
    assert counting.found == {
        "target_metadata_builds": 0, "target_forwards_full": 2, "target_forwards_piecewise": 1,
        "draft_forwards_none": 1,
    }  # fmt: skip
    state.replays = Counter(target=3, draft=2)
    assert counting.totals() == counting.found | {"target_forwards_full": 3, "draft_forwards_full": 2}
    state.replays["target"] = 1  # of replays that both saw
    assert counting.totals()["target_forwards_full"] == 2
    with played.forward_context.override_forward_context("odd"):  # the run goes on
        pass
    assert entered[-1] == "odd"
    assert state.errors[0].startswith("the counts of metadata builds and forwards ended: AttributeError")
    undo.close()
    assert played.forward_context.override_forward_context is enter
