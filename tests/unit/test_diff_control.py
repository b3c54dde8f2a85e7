"""Attribution by controls: what may be claimed, and what not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from altered import edit
from builders import Plan, attention, bump, drafted, pair, put, write

from localizer.diff import diff
from localizer.diff.attribution import ControlFacts
from localizer.diff.control import unfit, upstream_rows
from localizer.diff.result import Result
from localizer.errors import DamagedCapture, LocalizerError
from localizer.report.scope import scope
from localizer.store.reader import Capture
from localizer.store.schema import VERIFY_REJECTED, Checkout, Gpu, Identity, Imported, Weights
from localizer.wire.spec import HIDDEN, INPUT_IDS, LOGITS

QUERY = "r01.00", 4, attention(1, "query")
FAULT: dict[str, Any] = {"changes": {QUERY: bump()}}


def compared(root: Path, *controls: dict[str, Any], plan: Plan | None = None, **candidate: Any) -> Result:
    """Candidate, parent and controls, the latter two like the plan but for what is said."""
    plan = plan or Plan()
    one, other = pair(root, plan, **(candidate or FAULT))
    folders = [write(root, replace(plan, name=f"parent-{n}", **more)) for n, more in enumerate(controls, 2)]
    return diff(Capture(one), Capture(other), [Capture(folder) for folder in folders])


def only(found: Result) -> ControlFacts:
    assert found.controls is not None
    (control,) = found.controls.captures
    return control


def test_without_controls_nothing_is_attributed(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert (found.attribution, found.controls) == ("no-control", None)


def test_a_control_that_is_equal_there(tmp_path: Path) -> None:
    found = compared(tmp_path, {})
    assert (found.verdict, found.attribution) == ("diverged", "candidate-only")
    control = only(found)
    assert (control.verdict, control.at_first, control.differ, control.first) == (
        "identical",
        "equal",
        0,
        None,
    )
    assert found.controls is not None
    assert [(it.request, it.attribution) for it in found.controls.requests] == [("r01.00", "candidate-only")]
    assert any("one control is one sample" in line for line in scope(found).does_not_establish)


@pytest.mark.parametrize("change", [bump(), put(9.0, (2, 1))])
def test_a_control_that_differs_there_however_much(tmp_path: Path, change: Any) -> None:
    found = compared(tmp_path, {"changes": {QUERY: change}})
    assert (found.verdict, found.attribution, only(found).at_first) == (
        "diverged",
        "also-in-control",
        "differs",
    )


UPSTREAM = [
    ("r01.00", 4, attention(0, "output"), True),  # the same row, a site before
    ("r01.00", 3, attention(2, "output"), True),  # a row whose keys and values it reads
    ("r01.00", 0, attention(0, "key"), True),
    ("r01.00", 4, attention(1, "key"), False),  # computed beside it
    ("r01.00", 4, attention(1, "output"), False),  # behind it
    ("r01.00", 5, attention(0, "query"), False),
    ("r01.01", 3, attention(0, "query"), False),  # another request
    ("r00.00", 3, attention(0, "query"), False),  # the same prefix, but it computed that position itself
]


@pytest.mark.parametrize(("request_", "position", "site", "upstream"), UPSTREAM)
def test_upstream_and_elsewhere(
    tmp_path: Path, request_: str, position: int, site: str, upstream: bool
) -> None:
    found = compared(tmp_path, {"changes": {(request_, position, site): bump()}})
    assert found.attribution == ("also-in-control" if upstream else "candidate-only")
    control = only(found)
    assert control.at_first == ("differs-upstream" if upstream else "equal")
    where = control.upstream if upstream else control.first
    assert where is not None
    assert (where.request, where.position, where.site) == (request_, position, site)


def test_other_tokens_before_it_are_upstream(tmp_path: Path) -> None:
    tokens = Plan().tokens("r01.00")
    found = compared(tmp_path, {"outputs": {"r01.00": [15, *tokens[1:]]}})
    assert (found.attribution, only(found).at_first) == ("also-in-control", "tokens-differ-before")


def test_one_control_that_differs_outweighs_those_that_do_not(tmp_path: Path) -> None:
    found = compared(tmp_path, {}, FAULT, {})
    assert found.attribution == "also-in-control"
    assert found.controls is not None
    assert [control.at_first for control in found.controls.captures] == ["equal", "differs", "equal"]


UNFIT: list[tuple[dict[str, Any], str, str]] = [
    ({"manifest": False}, "incomplete", "equal"),
    ({"state": "incomplete", "reasons": ("disk full",)}, "incomplete", "equal"),
    ({"vllm": "0.31.0"}, "another-source", "equal"),
    ({"overlay": {"v1/attention.py": "ab"}}, "another-source", "equal"),
    ({"matrix": (2, 2)}, "another-workload", "equal"),
    ({"prompts": ((1, 2, 3), (4, 5, 7))}, "another-workload", "equal"),
    ({"max_tokens": 3}, "another-workload", "equal"),
    ({"engine": {"enforce_eager": True}}, "other-settings", "equal"),
    ({"environment": {"VLLM_X": "1"}}, "other-settings", "equal"),
]


@pytest.mark.parametrize(("more", "code", "shown"), UNFIT)
def test_what_is_no_second_sample_of_the_parent_attributes_nothing(
    tmp_path: Path, more: dict[str, Any], code: str, shown: str
) -> None:
    found = compared(tmp_path, more)
    control = only(found)
    assert (found.attribution, control.at_first) == ("no-control", shown)
    assert code in [item.code for item in control.unfit]
    assert any("no control attributes" in line for line in scope(found).does_not_establish)


def test_what_an_incomplete_control_shows_is_told_but_does_not_count(tmp_path: Path) -> None:
    found = compared(tmp_path, FAULT | {"manifest": False})
    assert (found.attribution, only(found).at_first) == ("no-control", "differs")
    assert found.controls is not None
    assert [(it.both, it.not_covered) for it in found.controls.sites] == [(0, 1)]


def test_paths_and_host_names_may_differ(tmp_path: Path) -> None:
    one, other = pair(tmp_path, **FAULT)
    control = write(tmp_path, Plan(name="parent-2"))
    edit(control, "open.json", lambda it: it["source"].update(python="/other/python", vllm_location="/there"))
    edit(control, "open.json", lambda it: it["host"].update(name="elsewhere"))
    captures = [Capture(folder) for folder in (one, other, control)]
    assert diff(captures[0], captures[1], captures[2:]).attribution == "candidate-only"
    edit(control, "open.json", lambda it: it["host"].update(system="Other"))
    found = diff(captures[0], captures[1], [Capture(control)])
    assert [item.code for item in only(found).unfit] == ["other-machine"]


def identity(**more: Any) -> dict[str, Any]:
    python = Imported(files=more.pop("files", 2), digest=more.pop("digest", "ab"), changed=[])
    native = more.pop("native", {"torch/lib/a.so": "aa"})
    return {"manifested": {"identity": Identity(native=native, python=python, **more)}}


def gpu(**more: str) -> Gpu:
    return Gpu(**({"name": "H200", "uuid": "u1", "driver": "580"} | more))


@pytest.mark.parametrize(
    ("ours", "theirs", "codes"),
    [
        (identity(), identity(), []),
        (identity(native={"torch/lib/a.so": "bb"}), identity(), ["another-source"]),
        (identity(native={"torch/lib/a.so": "aa", "b.so": "bb"}), identity(), []),
        (identity(native={"torch/lib/a.so": ""}), identity(), []),
        (identity(digest="cd"), identity(), ["another-source"]),
        (identity(digest="cd", files=3), identity(), []),
        (
            identity(checkout=Checkout(commit="1", dirty=None)),
            identity(checkout=Checkout(commit="2", dirty=None)),
            ["another-source"],
        ),
        (identity(gpus=[gpu(uuid="u2")]), identity(gpus=[gpu()]), []),
        (identity(gpus=[gpu(driver="570")]), identity(gpus=[gpu()]), ["other-machine"]),
        ({}, identity(), []),
    ],
)
def test_what_really_ran_must_be_the_same_where_both_know(
    tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any], codes: list[str]
) -> None:
    parent = Capture(write(tmp_path, Plan(name="parent", **theirs)))
    control = Capture(write(tmp_path, Plan(name="parent-2", **ours)))
    assert [item.code for item in unfit(control, parent)] == codes


def test_other_weights_as_loaded_are_other_settings(tmp_path: Path) -> None:
    def loaded(digest: str) -> Capture:
        known = {"weights": Weights(algorithm="xxh3-128", digest=digest, tensors={})}
        return Capture(write(tmp_path, Plan(name=f"parent-{digest}", manifested=known)))

    found = unfit(loaded("aa"), loaded("bb"))
    assert [(item.code, item.detail) for item in found] == [("other-settings", "loaded weights")]


UNCOVERED: list[tuple[dict[str, Any], str]] = [
    ({"layers": (0, 2)}, "no-site"),
    ({"absent": frozenset({QUERY})}, "not-recorded"),
    ({"only_tokens": True}, "no-site"),
]


@pytest.mark.parametrize(("more", "shown"), UNCOVERED)
def test_what_lacks_the_place_attributes_nothing(tmp_path: Path, more: dict[str, Any], shown: str) -> None:
    found = compared(tmp_path, more)
    control = only(found)
    assert (found.attribution, control.unfit, control.at_first) == ("no-control", [], shown)
    assert found.controls is not None
    assert [it.not_covered for it in found.controls.sites] == [1]


def test_each_request_has_its_own_attribution(tmp_path: Path) -> None:
    changes = {(name, 4, attention(1, "query")): bump() for name in ("r00.00", "r01.00", "r01.01")}
    noise = {("r01.00", 4, attention(1, "query")): bump((1,)), ("r01.01", 2, attention(0, "value")): bump()}
    found = compared(tmp_path, {"changes": noise}, changes=changes)
    assert found.attribution == "candidate-only"
    assert found.controls is not None
    assert [(it.request, it.attribution) for it in found.controls.requests] == [
        ("r00.00", "candidate-only"),
        ("r01.00", "also-in-control"),
        ("r01.01", "also-in-control"),
    ]
    sites = {
        it.site: (it.candidate_only, it.both, it.control_only, it.not_covered) for it in found.controls.sites
    }
    assert sites == {attention(0, "value"): (0, 0, 1, 0), attention(1, "query"): (2, 1, 0, 0)}


def test_requests_behind_the_detailed_ones_are_not_attributed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localizer.diff.control.DETAILED_REQUESTS", 1)
    changes = {(name, 4, attention(1, "query")): bump() for name in ("r00.00", "r01.00")}
    found = compared(tmp_path, {}, changes=changes)
    assert found.controls is not None
    assert [it.attribution for it in found.controls.requests] == ["candidate-only", "no-control"]


@pytest.mark.parametrize(
    ("theirs", "attribution", "shown"),
    [
        (None, "candidate-only", "equal"),
        ([0, 1, 2, 3], "also-in-control", "tokens-differ-before"),
        ("same", "also-in-control", "differs"),
        ("later", "candidate-only", "equal"),
    ],
)
def test_where_only_tokens_differ_they_are_the_place(
    tmp_path: Path, theirs: Any, attribution: str, shown: str
) -> None:
    plan = Plan(only_tokens=True)
    tokens = plan.tokens("r01.01")
    own = {"same": [tokens[0], 14, *tokens[2:]], "later": [*tokens[:3], 14]}
    outputs = {} if theirs is None else {"r01.01": own[theirs] if isinstance(theirs, str) else theirs}
    found = compared(tmp_path, {"outputs": outputs}, plan=plan, outputs={"r01.01": [tokens[0], 15, 15, 15]})
    assert (found.verdict, found.attribution, only(found).at_first) == ("diverged", attribution, shown)


def test_of_identical_captures_nothing_is_attributed(tmp_path: Path) -> None:
    found = compared(tmp_path, FAULT, state="complete")
    assert (found.verdict, found.attribution, only(found).at_first) == ("identical", "no-control", "no-place")
    assert found.controls is not None
    assert [(it.site, it.control_only) for it in found.controls.sites] == [(QUERY[2], 1)]


def test_other_models_are_not_attributed(tmp_path: Path) -> None:
    plan = Plan(model_files={"a": "aa"})
    found = compared(tmp_path, {}, plan=plan, model_files={"a": "bb"}, outputs={"r01.01": [15, 15, 15, 15]})
    assert (found.verdict, found.attribution) == ("inconclusive", "no-control")


def test_other_workloads_of_the_candidate_find_the_parents_row(tmp_path: Path) -> None:
    """The place is the parent's row, whichever request of the candidate pairs with it."""
    changes = {("r00.01", 4, attention(1, "query")): bump()}
    noise = {("r01.01", 4, attention(1, "query")): bump()}
    found = compared(tmp_path, {"changes": noise}, matrix=(2, 2), changes=changes)
    assert found.first is not None
    assert (found.first.request, found.first.parent_request) == ("r00.01", "r01.01")
    assert found.attribution == "also-in-control"


SPECULATING = Plan(speculate=3, matrix=(2,), max_tokens=8)


@pytest.mark.parametrize(
    ("where", "attribution"),
    [
        (("r00.00", 2, drafted(attention(3, "query"), 1)), "also-in-control"),
        (("r00.00", 2, HIDDEN), "also-in-control"),
        (("r00.01", 2, HIDDEN), "candidate-only"),
    ],
)
def test_the_target_and_earlier_draft_steps_lie_upstream_of_a_draft(
    tmp_path: Path, where: tuple[str, int, str], attribution: str
) -> None:
    fault = {("r00.00", 3, drafted(attention(3, "query"), 2)): bump()}
    found = compared(tmp_path, {"changes": {where: bump()}}, plan=SPECULATING, changes=fault)
    assert found.first is not None
    assert (found.first.kind, found.attribution) == ("draft-2", attribution)


@pytest.mark.parametrize(
    ("site", "before", "attribution"),
    [
        (HIDDEN, "model/auxiliary_hidden_states/1", "also-in-control"),
        ("model/auxiliary_hidden_states/1", INPUT_IDS, "also-in-control"),
        ("model/auxiliary_hidden_states/1", attention(0, "output"), "candidate-only"),
        ("model/auxiliary_hidden_states/1", "model/auxiliary_hidden_states/0", "candidate-only"),
    ],
)
def test_auxiliary_hidden_states_lie_between_inputs_and_end(
    tmp_path: Path, site: str, before: str, attribution: str
) -> None:
    noise = {"changes": {("r00.00", 2, before): bump(()) if before == INPUT_IDS else bump()}}
    found = compared(tmp_path, noise, plan=SPECULATING, changes={("r00.00", 2, site): bump()})
    assert found.attribution == attribution


def test_rejected_rows_of_earlier_steps_do_not_lie_upstream(tmp_path: Path) -> None:
    capture = Capture(write(tmp_path, replace(SPECULATING, max_tokens=12)))
    columns = capture.table.columns
    assert (columns["kind"] == VERIFY_REJECTED).any()
    row = int((columns["kind"] < VERIFY_REJECTED).nonzero()[0][-1])
    rows = upstream_rows(capture, row)
    assert columns["position"][rows].tolist() == list(range(columns["position"][row]))
    assert (columns["request"][rows] == columns["request"][row]).all()
    assert (columns["kind"][rows] < VERIFY_REJECTED).all()


def test_rows_of_equal_prefix_stand_for_cached_positions(tmp_path: Path) -> None:
    """A request whose first positions came from the prefix cache read what another request had written."""
    capture = Capture(write(tmp_path, Plan(matrix=(1, 1))))
    columns = capture.table.columns
    keep = ~((columns["request"] == 1) & (columns["position"] < 2))
    table = capture.table
    cached = {name: column[keep] for name, column in columns.items()}
    capture.table = replace(
        table,
        columns=cached,
        prefix=table.prefix[keep],
        digest=table.digest[keep],
        present=table.present[keep],
    )
    row = int(((cached["request"] == 1) & (cached["position"] == 4)).nonzero()[0][0])
    rows = upstream_rows(capture, row)
    assert list(zip(cached["request"][rows].tolist(), cached["position"][rows].tolist(), strict=True)) == [
        (0, 0),
        (0, 1),
        (1, 2),
        (1, 3),
    ]


def test_logits_beside_the_place_are_downstream(tmp_path: Path) -> None:
    assert compared(tmp_path, {"changes": {("r01.00", 4, LOGITS): bump()}}).attribution == "candidate-only"


# -- what is no control -----------------------------------------------------------------------------------


def test_the_parent_or_candidate_itself_is_refused(tmp_path: Path) -> None:
    one, other = (Capture(folder) for folder in pair(tmp_path, **FAULT))
    with pytest.raises(LocalizerError, match=r"is the parent itself.*capture the parent's source once more"):
        diff(one, other, [Capture(other.folder)])
    with pytest.raises(LocalizerError, match="is the candidate itself"):
        diff(one, other, [one])
    control = Capture(write(tmp_path, Plan(name="parent-2")))
    with pytest.raises(LocalizerError, match="is another control itself"):
        diff(one, other, [control, control])


def test_a_copy_of_the_parent_is_refused(tmp_path: Path) -> None:
    one, other = pair(tmp_path, **FAULT)
    copy = write(tmp_path / "elsewhere", Plan(name="parent"))
    with pytest.raises(LocalizerError, match="is the parent itself"):
        diff(Capture(one), Capture(other), [Capture(copy)])


def test_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalizerError, match="ran another model than the parent"):
        compared(tmp_path, {"model_files": {"a": "bb"}}, plan=Plan(model_files={"a": "aa"}))


def test_a_damaged_control_is_refused(tmp_path: Path) -> None:
    one, other = pair(tmp_path, **FAULT)
    control = write(tmp_path, Plan(name="parent-2"))
    shard = next(control.rglob("digests-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedCapture, match="digests-00000"):
        diff(Capture(one), Capture(other), [Capture(control)])


def test_a_capture_that_is_compared_with_itself_is_said_to_be(tmp_path: Path) -> None:
    one, two = pair(tmp_path, Plan())
    shutil.copytree(one, tmp_path / "copy")
    for other, codes in ((one, ["same-capture"]), (tmp_path / "copy", ["same-capture"]), (two, [])):
        found = diff(Capture(one), Capture(other))
        assert ([it.code for it in found.reasons], found.verdict) == (codes, "identical")
