"""The JSON report."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import golden
import msgspec
import pytest
from cases import CASES, result

from localizer.diff.result import Result
from localizer.report.formats import render

KEYS = {
    "schema", "verdict", "attribution", "reasons", "workloads_equal", "captures", "tokens", "first", "rows",
    "requests", "signatures", "histogram", "sites", "coverage", "differences", "scope", "speculation",
    "tolerances", "summary", "first_rows",
}  # fmt: skip


def printed(found: Result) -> str:
    stream = io.StringIO()
    render("json", found, stream)
    return stream.getvalue()


Made = Callable[[str], Result]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    """Makes the result of a case, always under the relative path `captures`."""

    def make(name: str) -> Result:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        return result(name, Path("captures"))

    return make


@pytest.mark.parametrize("name", ["attention", "tokens", "killed", "selected", "draft", "hostile"])
def test_json_is_as_expected(made: Made, name: str) -> None:
    golden.check(f"diff-{name}.json", printed(made(name)))


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
    from localizer.diff import result as records

    for record in vars(records).values():
        if isinstance(record, type) and issubclass(record, records.Record):
            for field in record.__struct_encode_fields__:
                assert f"`{field}`" in page, f"{record.__name__}.{field} is not in docs/result.md"
