"""A phase of a capture is what a capture of that phase alone would be, but for numbers and names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from altered import edit
from builders import Plan, attention, bump, write
from phased import BASE, QUERY, RAN, phased

from localizer.errors import DamagedCapture, LocalizerError
from localizer.store import sets
from localizer.store.phases import Phase, phase_of
from localizer.store.reader import Capture
from localizer.store.sets import Table

CHANGED = {("r03.01", 4, QUERY): bump()}


@pytest.fixture
def whole(tmp_path: Path) -> Capture:
    return Capture(write(tmp_path, phased(changes=CHANGED, traced=True, cached={"r02.00": 2})))


@pytest.fixture
def alone(tmp_path: Path) -> Capture:
    """What phase B computes, as a capture of its own."""
    changes = {("r01.01", 4, QUERY): bump()}
    return Capture(write(tmp_path, replace(BASE, name="alone", changes=changes, traced=True)))


def test_requests_go_by_the_first_phase(whole: Capture) -> None:
    places = phase_of(whole.open)
    assert places["r00.00"] == (0, "r00.00")
    assert places["r03.01"] == (1, "r01.01")
    assert places["r05.00"] == (2, "r01.00")
    assert len(places) == 9


def test_a_capture_without_phases_has_none(alone: Capture) -> None:
    assert phase_of(alone.open) == {}
    with pytest.raises(LocalizerError, match="has no phase B; make a capture with localize intervene"):
        Phase(alone, "B")


def test_a_phase_reads_like_a_capture_of_its_own(whole: Capture, alone: Capture) -> None:
    phase = Phase(whole, "B")
    assert phase.requests == alone.requests
    assert phase.prompts == alone.prompts
    assert phase.outputs == alone.outputs
    assert phase.sites == alone.sites
    assert (phase.label, phase.phase, whole.phase) == ("swap/0001 B", "B", "")
    assert phase.complete
    assert len(phase.table) == len(alone.table)
    steps = len(alone.steps)
    for name, column in alone.table.columns.items():
        shift = steps if name == "step" else 0
        assert np.array_equal(phase.table.columns[name], column + shift), name
    assert np.array_equal(phase.table.prefix, alone.table.prefix)
    assert np.array_equal(np.asarray(phase.table.digest), np.asarray(alone.table.digest))
    assert np.array_equal(np.asarray(phase.table.present), np.asarray(alone.table.present))
    assert np.array_equal(phase.table.recorded(), alone.table.recorded())
    phase.check()


def test_rows_in_any_order(whole: Capture, alone: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "WINDOW_ROWS", 3)
    digest, expected = Phase(whole, "B").table.digest, np.asarray(alone.table.digest)
    rows = np.array([5, 0, 3, 3])
    assert np.array_equal(digest[rows], expected[rows])
    assert np.array_equal(digest[2:7], expected[2:7])
    assert np.array_equal(digest[-1], expected[-1])
    assert np.array_equal(digest[:, 4], expected[:, 4])
    chosen = np.arange(len(digest)) % 2 == 0
    assert np.array_equal(digest[chosen], expected[chosen])
    assert np.array_equal(np.concatenate(list(digest.blocks())), expected)


def test_steps_name_requests_of_the_phase(whole: Capture, alone: Capture) -> None:
    phase = Phase(whole, "B")
    assert [step.requests for step in phase.steps] == [step.requests for step in alone.steps]
    ours, theirs = ([step.finished for step in it.steps] for it in (phase, alone))
    assert ours == theirs


def test_what_was_kept_of_a_row(whole: Capture, alone: Capture) -> None:
    phase, row = Phase(whole, "B"), 4
    for site in (QUERY, attention(0, "output")):
        kept, expected = phase.row_payload(site, row), alone.row_payload(site, row)
        assert kept is not None
        assert expected is not None
        assert kept.tobytes() == expected.tobytes()
        phase.check_row(site, row, kept)
    assert phase.row_payload(QUERY, len(phase.table)) is None
    assert phase.row_payload(QUERY, -1) is None
    with pytest.raises(DamagedCapture, match="does not have its digest"):
        phase.check_row(QUERY, row, np.zeros_like(kept))


def test_returned_tokens_and_what_came_from_the_cache(whole: Capture) -> None:
    manifest = Phase(whole, "B").manifest
    assert manifest is not None
    assert [output.cached_tokens for output in manifest.outputs] == [2, 0, 0]
    assert manifest.weights is None


def test_a_killed_run_has_the_phases_that_it_has(tmp_path: Path) -> None:
    whole = Capture(write(tmp_path, phased(manifest=False)))
    phase = Phase(whole, "B")
    assert not phase.complete
    assert set(phase.outputs) == {"r00.00", "r01.00", "r01.01"}


def test_rows_of_two_phases_may_not_be_mixed(whole: Capture) -> None:
    table = whole.table
    columns = {name: column[::-1] for name, column in table.columns.items()}
    vars(whole)["table"] = Table(columns, table.prefix, table.digest, table.present)
    with pytest.raises(DamagedCapture, match="rows of two phases are mixed"):
        _ = Phase(whole, "B").table


def test_phases_must_make_up_the_passes(tmp_path: Path) -> None:
    plan = phased()
    with pytest.raises(ValueError, match="its phases do not make up its passes"):
        write(tmp_path, replace(plan, repeats=4))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repeats", 2), ("repeats", 0), ("phases", ["A1", "B", "B"]), ("phases", ["A1", "B", "\x1b"]),
        ("phases", []), ("kind", "magic"), ("patches", [{"target": 1}]),
    ],
)  # fmt: skip
def test_documents_that_contradict_themselves_are_damaged(tmp_path: Path, field: str, value: object) -> None:
    folder = write(tmp_path, phased())
    edit(folder, "open.json", lambda content: content["intervention"].update({field: value}))
    with pytest.raises(DamagedCapture, match=r"open\.json is damaged"):
        Capture(folder)


def test_calls_are_counts(tmp_path: Path) -> None:
    folder = write(tmp_path, phased("patch", RAN))
    edit(folder, "manifest.json", lambda it: it["intervention"]["workers"][0][0].update(in_steps=-1))
    with pytest.raises(DamagedCapture, match=r"manifest\.json is damaged"):
        Capture(folder)


def test_an_older_capture_has_no_intervention(alone: Capture) -> None:
    assert isinstance(alone, Capture)
    assert alone.open.intervention is None
    assert alone.manifest is not None
    assert alone.manifest.intervention is None
    assert isinstance(BASE, Plan)
