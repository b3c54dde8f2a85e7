"""What the phases of a capture say: did the change run, was it put back, and what did it change?"""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import Plan, write
from phased import CASES, QUERY, TARGET, phased, taken

from localizer.diff import intervention as codes
from localizer.diff.intervention import Intervened, judge
from localizer.errors import LocalizerError
from localizer.store.interventions import Changed
from localizer.store.reader import Capture


def said(answer: Intervened) -> list[tuple[str, str]]:
    return [(limit.code, limit.detail) for limit in answer.reasons]


def test_what_a_patch_changed_is_told_with_a2_as_the_control(tmp_path: Path) -> None:
    answer = judge(taken("diverged", tmp_path))
    assert (answer.verdict, said(answer)) == ("diverged", [])
    first = answer.changed.first
    assert first is not None
    assert (first.request, first.position, first.site) == ("r01.01", 4, QUERY)
    assert answer.changed.attribution == "candidate-only"
    assert answer.restored.verdict == "identical"
    assert [phase.name for phase in answer.phases] == ["A1", "B", "A2"]
    assert [(phase.first_round, phase.rounds, phase.requests) for phase in answer.phases] == [
        (0, 2, 3), (2, 2, 3), (4, 2, 3),
    ]  # fmt: skip
    assert answer.compiled is False


def test_a_patch_that_changes_nothing_is_identical(tmp_path: Path) -> None:
    answer = judge(taken("no-op", tmp_path))
    assert (answer.verdict, said(answer)) == ("identical", [])
    assert answer.compiled is None


def test_a_process_that_does_not_come_back(tmp_path: Path) -> None:
    answer = judge(taken("not-back", tmp_path))
    assert (answer.verdict, said(answer)) == ("diverged", [(codes.NOT_BACK, "")])
    assert answer.changed.attribution == "also-in-control"


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        (
            "never-ran",
            [
                *[(codes.NOT_RESET, "")] * 3,
                (codes.NEVER_RAN, codes.ELSEWHERE),
                (codes.NEVER_RAN, codes.NOT_CALLED),
                (codes.NOT_RESTORED, ""),
            ],
        ),
        ("compiled", [(codes.NEVER_RAN, codes.COMPILED)]),
        ("outside", [(codes.NEVER_RAN, codes.OUTSIDE)]),
        ("cold", [(codes.NEVER_RAN, codes.NOT_EMPTY), (codes.NEVER_RAN, codes.NOT_WARM)]),
        ("killed", [(codes.NOT_KNOWN, "")]),
    ],
)
def test_what_makes_it_inconclusive(tmp_path: Path, name: str, reasons: list[tuple[str, str]]) -> None:
    answer = judge(taken(name, tmp_path))
    assert (answer.verdict, said(answer)) == ("inconclusive", reasons)


def test_differences_of_a_change_that_never_ran_are_listed_all_the_same(tmp_path: Path) -> None:
    answer = judge(taken("never-ran", tmp_path))
    assert answer.changed.verdict == "diverged"
    assert answer.changed.first is not None


@pytest.mark.parametrize("name", ["everywhere", "prefix-cache", "attention-backend"])
def test_what_ran_is_conclusive(tmp_path: Path, name: str) -> None:
    answer = judge(taken(name, tmp_path))
    assert (answer.verdict, said(answer)) == ("identical", [])


def test_every_worker_must_have_run_it(tmp_path: Path) -> None:
    ran, idle = (Changed(target=TARGET, in_steps=calls, outside=0, restored=True) for calls in (5, 0))
    plan = phased("patch", ran)
    course = plan.manifested["intervention"]
    course.workers.append([idle])
    answer = judge(Capture(write(tmp_path, plan)))
    (limit,) = answer.reasons
    assert (limit.detail, limit.worker) == (codes.NOT_CALLED, 1)


def test_workers_that_say_nothing(tmp_path: Path) -> None:
    answer = judge(Capture(write(tmp_path, phased("patch"))))
    assert said(answer) == [(codes.NOT_KNOWN, "")]


def test_a_capture_without_phases(tmp_path: Path) -> None:
    with pytest.raises(LocalizerError, match="has no phases; make a capture with localize intervene"):
        judge(Capture(write(tmp_path, Plan())))


def test_every_case_is_judged(tmp_path: Path) -> None:
    assert {judge(taken(name, tmp_path / name)).verdict for name in CASES} == {
        "identical", "diverged", "inconclusive",
    }  # fmt: skip
