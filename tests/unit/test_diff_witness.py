"""Did the rows that lead to a difference come again: also where the first pass hashed them on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import Plan, attention, bump, write

from localizer.diff import diff
from localizer.diff.runs import Reproduction, Way
from localizer.diff.witness import attributed, reproduction
from localizer.store.reader import Capture

QUERY = attention(1, "query")
WAYS = [Way(request="r00.00", position=3, why="token")]
FIRST = Plan(name="first", payload=frozenset())


def again(root: Path, first: Plan, **witness: object) -> Reproduction:
    kept = replace(first, name="again", hashed=False, payload=None)
    captures = [Capture(write(root, plan)) for plan in (replace(kept, **witness), first)]
    return reproduction(*captures, WAYS)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("hashed", [False, True], ids=["host", "device"])
def test_what_came_again_was_compared_at_every_site(tmp_path: Path, hashed: bool, ranks: int) -> None:
    first = replace(FIRST, hashed=hashed, ranks=ranks)
    found = again(tmp_path, first)
    assert found.reproduced
    everything = Capture(tmp_path / "first" / "0001").table.present[:4]
    assert (found.rows, found.compared, found.missing) == (4, int(everything.sum()), 0)


@pytest.mark.parametrize("hashed", [False, True], ids=["host", "device"])
def test_what_did_not_come_again(tmp_path: Path, hashed: bool) -> None:
    changes = {("r00.00", 2, QUERY): bump(), ("r00.00", 1, attention(2, "query")): bump()}
    found = again(tmp_path, replace(FIRST, hashed=hashed), changes=changes)
    assert not found.reproduced
    assert (found.differ, found.first_position, found.first_site) == (2, 1, attention(2, "query"))


@pytest.mark.parametrize("hashed", [False, True], ids=["host", "device"])
def test_what_the_witness_lacks(tmp_path: Path, hashed: bool) -> None:
    absent = frozenset({("r00.00", 2, QUERY)})
    found = again(tmp_path, replace(FIRST, hashed=hashed), absent=absent, state="incomplete")
    assert not found.reproduced
    assert (found.differ, found.missing) == (0, 1)


@pytest.mark.parametrize("hashed", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("noisy", [False, True])
def test_what_controls_showed_holds_for_the_witness(tmp_path: Path, hashed: bool, noisy: bool) -> None:
    changes = {("r00.00", 2, QUERY): bump()}
    first = replace(FIRST, hashed=hashed)
    control = Capture(write(tmp_path, replace(first, name="control", changes=changes if noisy else {})))
    ours, theirs, again, other = (
        Capture(write(tmp_path, replace(plan, name=f"{name}-{number}", changes=made)))
        for number, plan in enumerate((first, replace(FIRST, payload=None)))
        for name, made in (("candidate", changes), ("parent", {}))
    )
    first_pass, found = diff(ours, theirs, [control]), diff(again, other, [control])
    result = attributed(found, first_pass)
    assert result.attribution == ("also-in-control" if noisy else "candidate-only")
    assert result.controls is not None
    elsewhere = Capture(
        write(tmp_path, replace(FIRST, name="else", payload=None, changes={("r00.00", 1, QUERY): bump()}))
    )
    moved = diff(elsewhere, other, [control])
    assert attributed(moved, first_pass) == moved
