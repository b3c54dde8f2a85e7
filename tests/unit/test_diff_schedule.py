"""What two schedules differ in is listed, each part at the first step that shows it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import Plan, write

from localizer.diff import schedule
from localizer.store.reader import Capture
from localizer.store.trace import StepTrace

Made = Callable[..., dict[str, tuple[Any, Any]]]


@pytest.fixture
def found(tmp_path: Path) -> Made:
    """The differences of two equal captures, after a change of the candidate's steps."""

    numbers = count()

    def make(change: Callable[[list[StepTrace]], list[StepTrace]], **plan: Any) -> dict[str, tuple[Any, Any]]:
        root = tmp_path / str(next(numbers))
        pair = [Capture(write(root, Plan(name=name, traced=True, **plan))) for name in ("one", "other")]
        vars(pair[0])["steps"] = change(list(pair[0].steps))
        return {item.setting: (item.candidate, item.parent) for item in schedule.differences(*pair)}

    return make


def changed(at: int, **fields: Any) -> Callable[[list[StepTrace]], list[StepTrace]]:
    def change(steps: list[StepTrace]) -> list[StepTrace]:
        steps[at] = msgspec.structs.replace(steps[at], **fields)
        return steps

    return change


def test_equal_schedules_differ_in_nothing(found: Made) -> None:
    assert found(lambda steps: steps) == {}


def test_without_a_trace_nothing_is_said(found: Made) -> None:
    assert found(lambda steps: []) == {}


def test_the_number_of_steps(found: Made) -> None:
    assert found(lambda steps: steps[:-1]) == {"schedule.steps": (7, 8)}


def test_the_first_step_that_was_asked_for_something_else(found: Made) -> None:
    assert found(changed(4, scheduled=[2, 3])) == {
        "schedule.first difference": ("step 4: 2 requests, 5 tokens", "step 4: 2 requests, 6 tokens")
    }


def test_graph_modes_are_counted(found: Made) -> None:
    differences = found(changed(2, graph="FULL"))
    assert differences == {"schedule.graph modes": ({"NONE": 7, "FULL": 1}, {"NONE": 8})}


def test_padding_blocks_and_slots(found: Made) -> None:
    assert found(changed(1, padded=8)) == {"schedule.padded rows": ("step 1: 7", "step 1: 0")}
    one = "11" * 16
    assert set(found(changed(5, blocks=[one, one]))) == {"schedule.block tables"}
    assert found(changed(5, slots=[one, one]))["schedule.slots"][1] is None


def test_the_scalars_of_the_backend(found: Made) -> None:
    backend = {"max_query_len": 9, "causal": True, "use_cascade": False}
    assert found(changed(3, backend=backend)) == {
        "schedule.backend.max_query_len": ("step 3: 9", "step 3: 1"),
        "schedule.backend.use_cascade": ("step 3: False", None),
    }


def test_behind_another_schedule_forwards_are_not_compared(found: Made) -> None:
    def change(steps: list[StepTrace]) -> list[StepTrace]:
        return changed(6, padded=9)(changed(4, scheduled=[2, 3])(steps))

    assert set(found(change)) == {"schedule.first difference"}


def test_long_traces_are_left_alone(found: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MOST_BYTES", 100)
    assert found(changed(4, scheduled=[2, 3])) == {}
