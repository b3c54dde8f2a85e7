"""The map of a diff: every differing pair is a cell or is counted as left out, and no other is."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest
from builders import Plan, attention, bump, drafted, pair, put, write
from cases import CASES, WITHIN, within
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localizer.diff import diff, diff_within, mapped, returned
from localizer.diff.align import align
from localizer.diff.cells import CLASS_STATES, DIFFERENT, EQUAL, NOT_APPLICABLE, NOT_COMPARED, Cells
from localizer.diff.compare import compare
from localizer.diff.result import Result
from localizer.store.reader import Capture
from localizer.wire.spec import HIDDEN, LOGITS

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
PLAN = Plan(layers=2, repeats=2, chunk=2)


def differing(found: Cells) -> set[tuple[str, int, int, str, str]]:
    """(request, position, step, kind, site) of all cells."""
    return {
        (item.request, row.position, row.step, row.kind, found.sites[cell.site])
        for item in found.requests
        for cell in item.cells
        for row in (item.rows[cell.row],)
    }


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Capture]:
    root = tmp_path_factory.mktemp("parent")
    return cache(lambda: Capture(write(root, replace(PLAN, name="parent"))))


def places() -> st.SearchStrategy[dict[tuple[str, int, str], object]]:
    """Planted changes of any rows of any sites."""
    sites = [site.name for site in PLAN.sites() if site.shape and site.rows == "all"]
    place = st.tuples(st.sampled_from(PLAN.requests), st.integers(0, 5), st.sampled_from(sites))
    return st.dictionaries(
        place, st.integers(1, 40).map(lambda ulps: bump((0,), ulps)), min_size=1, max_size=30
    )


@QUICK
@given(changes=places(), most=st.sampled_from([1, 5, 1000]), rows=st.sampled_from([2, 1000]), data=st.data())
def test_every_differing_pair_is_a_cell_or_counted(
    parent: Callable[[], Capture], changes: dict[object, object], most: int, rows: int, data: st.DataObject
) -> None:
    kept = data.draw(st.sampled_from([None, frozenset[str]()]), label="payload")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in (("CELLS_A_REQUEST", most), ("MOST_CELLS", 3 * most), ("MOST_ROWS", rows)):
            patch.setattr(mapped, name, value)
        patch.setattr(mapped, "ROWS_BEFORE", 1)
        candidate = Capture(write(Path(folder), replace(PLAN, changes=changes, payload=kept)))
        found = diff(candidate, parent(), cells=True)
        alignment = align(candidate, parent())
        comparison = compare(candidate, parent(), alignment)
        columns = candidate.table.columns
        truth = {
            (
                candidate.requests[columns["request"][row]],
                int(columns["position"][row]),
                int(columns["step"][row]),
                alignment.sites[site],
            )
            for number, row in enumerate(alignment.candidate)
            for site in comparison.differ[number].nonzero()[0]
        }
    cells = found.cells
    assert cells is not None
    told = {(request, position, step, site) for request, position, step, _, site in differing(cells)}
    assert told <= truth
    assert len(truth) == found.coverage.pairs.differ
    assert len(told) == sum(len(item.cells) for item in cells.requests)
    assert len(told) + cells.cells_left_out == len(truth)
    assert cells.cells_left_out >= sum(item.cells_left_out for item in cells.requests)
    if most == rows == 1000:
        assert (told, cells.cells_left_out) == (truth, 0)
    assert found.first is not None
    assert (found.first.request, found.first.position, found.first.step, found.first.site) in told
    for item in cells.requests:
        described = {(cell.row, cell.site) for cell in item.cells}
        assert [*described] == [*dict.fromkeys(described)]
        for number, row in enumerate(item.rows):
            assert len(row.states) == len(cells.sites)
            for site, state in enumerate(row.states):
                known = state in CLASS_STATES.values()
                assert known == ((number, site) in described and kept is None)
                assert known or state in (EQUAL, DIFFERENT, NOT_COMPARED, NOT_APPLICABLE)
                different = (item.request, row.position, row.step, cells.sites[site]) in truth
                assert different == (known or state == DIFFERENT)


def test_a_cell_has_the_numbers_of_the_finding(tmp_path: Path) -> None:
    one, other = pair(tmp_path, changes={("r01.00", 4, attention(1, "key")): put(float("nan"), (0, 2))})
    found = diff(Capture(one), Capture(other), cells=True)
    assert found.cells is not None
    assert found.first is not None
    (cell,) = [cell for item in found.cells.requests for cell in item.cells]
    for name in set(cell.__struct_fields__) - {"row", "site"}:
        assert getattr(cell, name) == getattr(found.first, name), name
    assert found.cells.requests[0].rows[cell.row].states[cell.site] == CLASS_STATES["non-finite"]


def test_what_is_equal_missing_and_not_there_is_told_apart(tmp_path: Path) -> None:
    absent = frozenset({("r01.00", 3, attention(1, "query"))})
    outputs = {"r01.00": [*Plan().tokens("r01.00")[:2], 0, 0]}
    one, other = pair(tmp_path, absent=absent, outputs=outputs)
    found = diff(Capture(one), Capture(other), cells=True).cells
    assert found is not None
    rows = next(item for item in found.requests if item.request == "r01.00").rows
    where = {name: found.sites.index(name) for name in (attention(1, "query"), HIDDEN, LOGITS)}
    state = {(row.position, name): row.states[site] for row in rows for name, site in where.items()}
    assert state[0, attention(1, "query")] == EQUAL
    assert state[3, attention(1, "query")] == NOT_COMPARED
    assert state[0, HIDDEN] == NOT_APPLICABLE
    assert state[3, HIDDEN] == EQUAL
    assert [row.parent_request for row in rows] == ["r01.00"] * 5 + [None]
    assert set(rows[-1].states) == {NOT_COMPARED}


def test_a_request_that_differs_first_comes_first_and_a_long_one_is_cut_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "MOST_ROWS", 3)
    monkeypatch.setattr(mapped, "ROWS_BEFORE", 1)
    changes = {("r01.01", position, attention(1, "query")): bump() for position in (2, 5)}
    one, other = pair(tmp_path, changes=changes)
    found = diff(Capture(one), Capture(other), cells=True).cells
    assert found is not None
    assert [item.request for item in found.requests] == ["r01.01", "r00.00", "r01.00"]
    item = found.requests[0]
    assert [row.position for row in item.rows] == [1, 2, 3]
    assert (item.rows_before, item.rows_after, item.differ, item.cells_left_out) == (1, 2, 2, 1)
    assert found.cells_left_out == 1
    monkeypatch.setattr(mapped, "MOST_REQUESTS", 1)
    found = diff(Capture(one), Capture(other), cells=True).cells
    assert found is not None
    assert ([item.request for item in found.requests], found.requests_left_out) == (["r01.01"], 2)
    monkeypatch.setattr(mapped, "MOST_STATES", 1)
    found = diff(Capture(one), Capture(other), cells=True).cells
    assert found is not None
    assert len(found.requests) == 1


def test_a_draft_has_cells_and_no_padding(tmp_path: Path) -> None:
    plan, candidate = CASES["draft"]
    one, other = pair(tmp_path, plan, **candidate)
    found = diff(Capture(one), Capture(other), cells=True).cells
    assert found is not None
    ((request, position, _, kind, site),) = differing(found)
    assert (request, position, kind, site) == ("r01.01", 9, "draft-1", drafted(attention(4, "query"), 1)[:-2])
    assert {row.kind for item in found.requests for row in item.rows} >= {"draft-1", "verify-accepted"}
    assert not [row for item in found.requests for row in item.rows if row.kind == "draft-padding"]
    drafts = [name.startswith("draft:") for name in found.sites]
    assert drafts == sorted(drafts)


@pytest.mark.parametrize("name", ["models", "tokens"])
def test_where_nothing_was_compared_there_is_nothing_to_map(tmp_path: Path, name: str) -> None:
    plan, candidate = CASES[name]
    one, other = pair(tmp_path, plan, **candidate)
    found = diff(Capture(one), Capture(other), cells=True).cells
    assert found == Cells(sites=[], requests=[], requests_left_out=0, cells_left_out=0)


@pytest.mark.parametrize("name", WITHIN)
def test_one_capture_within(tmp_path: Path, name: str) -> None:
    plain = within(name, tmp_path / "plain")
    found = diff_within(Capture(write(tmp_path / "mapped", Plan(**WITHIN[name]))), cells=True)
    assert found.cells is not None
    assert len(differing(found.cells)) == plain.coverage.pairs.differ
    unlike = msgspec.structs.replace(found, cells=None, returned=None, captures=plain.captures)
    assert unlike == plain


def test_nothing_else_changes(tmp_path: Path) -> None:
    plan, candidate = CASES["diverged"]
    one, other = pair(tmp_path, plan, **candidate)
    plain, found = (diff(Capture(one), Capture(other), cells=cells) for cells in (False, True))
    assert plain.cells is plain.returned is None
    assert msgspec.structs.replace(found, cells=None, returned=None) == plain
    assert msgspec.json.decode(msgspec.json.encode(found), type=Result) == found
    assert json.loads(msgspec.json.encode(found))["cells"]["requests"][0]["cells"][0]["class"] == "1-ulp"


# -- returned tokens --------------------------------------------------------------------------------------


def test_returned_tokens_of_requests_that_differ(tmp_path: Path) -> None:
    outputs = {"r01.01": [9, 9], "r01.00": [*Plan().tokens("r01.00")[:3], 0]}
    one, other = pair(tmp_path, outputs=outputs)
    found = diff(Capture(one), Capture(other), cells=True).returned
    assert found is not None
    assert found.requests_left_out == 0
    assert [(item.request, item.first, item.differ) for item in found.requests] == [
        ("r01.01", 0, 4),
        ("r01.00", 3, 1),
    ]
    item = found.requests[0]
    assert (item.prompt_tokens, item.positions, item.start) == (3, 4, 0)
    assert (item.lengths.candidate, item.lengths.parent) == (2, 4)
    assert (item.tokens.candidate, item.tokens.parent) == ([9, 9], Plan().tokens("r01.01"))


def test_long_outputs_are_cut_around_the_first_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(max_tokens=30, only_tokens=True)
    tokens = plan.tokens("r01.00")
    changed = [*tokens[:20], *((token + 1) % 16 for token in tokens[20:])]
    one, other = pair(tmp_path, plan, outputs={"r01.00": changed, "r01.01": [0] * 30})
    for most, before, start in ((8, 3, 17), (8, 0, 20), (16, 3, 14), (30, 3, 0)):
        monkeypatch.setattr(returned, "MOST_TOKENS", most)
        monkeypatch.setattr(returned, "TOKENS_BEFORE", before)
        found = diff(Capture(one), Capture(other), cells=True).returned
        assert found is not None
        item = next(item for item in found.requests if item.request == "r01.00")
        assert (item.first, item.start) == (20, start)
        assert item.tokens.candidate == changed[start : start + most]
    monkeypatch.setattr(returned, "MOST_REQUESTS", 1)
    found = diff(Capture(one), Capture(other), cells=True).returned
    assert found is not None
    assert (len(found.requests), found.requests_left_out) == (1, 1)
