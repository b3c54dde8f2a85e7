"""The JSON report."""

from __future__ import annotations

import io
import json
from pathlib import Path

import golden
import msgspec
import pytest
from cases import CASES, PARENTS, WITHIN, Made, controlled, explained, within

from localizer.diff.plan import Plan
from localizer.diff.result import Result
from localizer.report.formats import render

KEYS = {
    "schema", "verdict", "attribution", "reasons", "workloads_equal", "captures", "tokens", "first", "rows",
    "requests", "signatures", "histogram", "sites", "coverage", "differences", "scope", "speculation",
    "tolerances", "summary", "first_rows", "controls", "plan", "cells", "returned",
}  # fmt: skip


def printed(found: Result) -> str:
    stream = io.StringIO()
    render("json", found, stream)
    return stream.getvalue()


@pytest.mark.parametrize("name", ["attention", "tokens", "killed", "selected", "draft", "hostile"])
def test_json_is_as_expected(made: Made, name: str) -> None:
    golden.check(f"diff-{name}.json", printed(made(name)))


@pytest.mark.parametrize("name", ["also-in-control", "no-attribution"])
def test_controls_are_as_expected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    golden.check(f"diff-control-{name}.json", printed(controlled(name, Path("captures"))))


@pytest.mark.parametrize("name", PARENTS)
def test_every_control_has_its_sentences(tmp_path: Path, name: str) -> None:
    found = controlled(name, tmp_path)
    tree = json.loads(printed(found))
    assert found.controls is not None
    assert tree["attribution"] == found.attribution
    for item, control in zip(tree["controls"]["captures"], found.controls.captures, strict=True):
        assert [unfit["code"] for unfit in item["unfit"]] == [unfit.code for unfit in control.unfit]
        assert all(unfit["text"] for unfit in item["unfit"])
    again = msgspec.convert({**tree, "reasons": []}, Result)
    assert again == msgspec.structs.replace(found, reasons=[])


@pytest.mark.parametrize("name", WITHIN)
def test_one_capture_within(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    tree = json.loads(printed(found := within(name, Path("captures"), explain=True)))
    assert tree["plan"]["align"]["key"] == tree["coverage"]["rows"]["paired_by"] == "within"
    assert tree["captures"]["candidate"] == tree["captures"]["parent"]
    assert all(item["source"] == "capture" and item["text"] for item in tree["reasons"])
    assert msgspec.convert(tree["plan"], Plan) == found.plan
    if name == "within-diverged":
        golden.check(f"diff-{name}.json", printed(found))


def test_the_plan_is_as_expected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    tree = json.loads(printed(explained("workloads", Path("captures"))))
    golden.check("diff-plan-workloads.json", json.dumps(tree["plan"], indent=1) + "\n")


@pytest.mark.parametrize("name", CASES)
def test_json_is_the_result_and_its_words(made: Made, name: str) -> None:
    found = made(name)
    blob = printed(found)
    tree = json.loads(blob)
    assert set(tree) == KEYS
    assert tree["schema"] == 1
    assert blob.isascii()
    assert not [char for char in blob.replace("\n", "") if not char.isprintable()]
    scope, reasons = tree.pop("scope"), tree.pop("reasons")
    assert set(scope) == {"establishes", "does_not_establish"}
    for item, reason in zip(reasons, found.reasons, strict=True):
        assert (item["code"], item["source"]) == (reason.code, reason.source)
        assert item["text"]
    again = msgspec.convert({**tree, "reasons": []}, Result)
    assert again == msgspec.structs.replace(found, reasons=[])


def test_the_keys_of_the_example_in_the_docs(made: Made) -> None:
    tree = json.loads(printed(made("diverged")))
    assert tree["first"]["segment"] == {
        "after": "model.layers.17.self_attn.attn/output",
        "before": "model.layers.18.self_attn.attn/query",
        "after_code": None,
        "before_code": None,
        "code_of": None,
    }
    assert (tree["first"]["class"], tree["first"]["max_ulp"]) == ("1-ulp", 1)
    assert {
        "request",
        "position",
        "kind",
        "step",
        "site",
        "elements_differ",
        "elements",
        "first_element",
    } <= set(tree["first"])
    assert tree["tokens"]["first"].keys() == {"request", "position", "output_index"}
    assert {"site", "rows_compared", "rows_differ"} <= set(tree["sites"][0])


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "result.md").read_text()
    from localizer.diff import attribution, cells, plan, result

    for record in (item for module in (result, attribution, plan, cells) for item in vars(module).values()):
        if isinstance(record, type) and issubclass(record, result.Record):
            for field in record.__struct_encode_fields__:
                assert f"`{field}`" in page, f"{record.__name__}.{field} is not in docs/result.md"
    codes = [code for name, code in vars(attribution).items() if name.isupper()]
    states = cells.CLASS_STATES | {"different": "?", "equal": "=", "not compared": "-", "not applicable": "."}
    for code in [*codes, *plan.UNPAIRED, *states.values()]:
        assert f"`{code}`" in page
