"""How classes, heads, rows and tolerances are told; one gold file shows every class in every state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import golden
import msgspec
import numpy as np
import pytest
from builders import Change, Plan, attention, bump, pair, put
from findings import finding

from localizer.diff import diff
from localizer.diff.elements import CLASSES
from localizer.diff.result import Head, Result
from localizer.diff.summary import summarize
from localizer.diff.tolerance import parse
from localizer.report import json, rows, summary, text, wording
from localizer.store.reader import Capture
from localizer.wire.spec import HIDDEN, INPUT_IDS, LOGITS, TOKEN

QUERY = attention(1, "query")
WHERE = ("r01.00", 4, QUERY)


def both(index: tuple[int, ...], candidate: int, parent: int) -> tuple[dict[Any, Change], dict[Any, Change]]:
    """Bit patterns of an element, in the two captures."""

    def change(word: int) -> Change:
        def put_bits(row: np.ndarray) -> np.ndarray:
            bits = row.copy().view(np.uint16)
            bits[index] = word
            return bits.view(row.dtype)

        return put_bits

    return {WHERE: change(candidate)}, {WHERE: change(parent)}


def one(change: Change) -> tuple[dict[Any, Change], dict[Any, Change]]:
    return {WHERE: change}, {}


KINDS: dict[str, tuple[dict[Any, Change], dict[Any, Change]]] = {
    "signed-zero": both((2, 1), 0x8000, 0x0000),
    "nan-payload": both((2, 1), 0x7FC1, 0x7FC0),
    "1-ulp": one(bump((2, 1))),
    "k-ulp": one(bump((2, 1), 3)),
    "value": one(put(3.0, (2, 1))),
    "non-finite": one(put(float("inf"), (0, 0))),
    "shape": ({}, {}),
    "dtype": ({}, {}),
}
LAYOUTS = {"shape": ("bfloat16", (4, 3)), "dtype": ("float16", (3, 4))}

TOLERANCES: dict[str, list[str]] = {
    "no tolerance": [],
    "ulp:1": ["*/query=ulp:1"],
    "abs:10|rel:10": ["*/query=abs:10|rel:10"],
}


def compared(root: Path, kind: str, tolerances: Sequence[str]) -> Result:
    ours, theirs = KINDS[kind]
    layouts = {QUERY: LAYOUTS[kind]} if kind in LAYOUTS else {}
    made = pair(root, Plan(changes=theirs), changes=ours, layouts=layouts)
    return diff(*map(Capture, made), tolerances=[parse(given) for given in tolerances])


def lines(result: Result) -> list[str]:
    """The plain report."""
    return [line.rstrip() for block in text.document(result) for line in text.plain(block)]


def test_every_class_in_every_state(tmp_path: Path) -> None:
    assert tuple(KINDS) == CLASSES
    told = []
    for kind in KINDS:
        for state, tolerances in TOLERANCES.items():
            result = compared(tmp_path / kind / str(len(told)), kind, tolerances)
            assert result.first is not None
            assert (result.verdict, result.first.class_) == ("diverged", kind)
            report = lines(result)
            told += [f"{kind}, {state}", report[1], wording.elements(result.first)]
            told += [" ".join(line.split()) for line in report if line.startswith(f"  {QUERY} ")]
            told.append("")
    golden.check("diff-classes.txt", "\n".join(told))


HEADS = {
    ("r00.00", 2, QUERY): bump((1, 0)),
    ("r00.00", 3, QUERY): bump((0, 0), 5),
    ("r01.01", 4, QUERY): put(float("nan"), (2, 3)),
    ("r01.01", 3, QUERY): bump((0,)),
    ("r01.01", 3, attention(1, "key")): bump((0, 2), 2),
}


@pytest.mark.parametrize("style", ["txt", "json"])
def test_heads_rows_and_tolerances_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: str
) -> None:
    monkeypatch.chdir(tmp_path)
    made = pair(Path("captures"), Plan(), changes=HEADS)
    given = [parse("*/query=ulp:4|abs:1e-3"), parse("nothing=rel:0.5")]
    result = diff(*map(Capture, made), tolerances=given)
    if style == "txt":
        golden.check("diff-tolerance.txt", "\n".join(lines(result)) + "\n")
    else:
        tree = json.tree(result)
        shown = {key: tree[key] for key in ("verdict", "tolerances", "summary", "first_rows", "sites")}
        shown["heads"] = tree["first"]["heads"]
        shown["sites"] = [site for site in shown["sites"] if site["rows_differ"]]
        golden.check("diff-tolerance.json", msgspec.json.format(msgspec.json.encode(shown)).decode() + "\n")


# -- the sentence -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The sentence about a finding, with what a control says."""
    result = compared(tmp_path_factory.mktemp("told"), "1-ulp", [])

    def tell(after: str | None, before: str, control: str = "no-control", **more: object) -> str:
        brief = summarize(finding(after, before, **more), control)
        return summary.sentence(msgspec.structs.replace(result, summary=brief))

    return tell


def heads(*numbers: int, of: int) -> dict[str, object]:
    listed = [Head(head=number, class_="1-ulp", elements_differ=3, max_ulp=1) for number in numbers]
    return {"heads": listed, "heads_differ": len(listed), "heads_compared": of}


def test_the_sentence_that_a_maintainer_wants(told: Callable[..., str]) -> None:
    said = told(
        attention(5, "value"),
        attention(5, "output"),
        "candidate-only",
        request="r03.05",
        position=41,
        **heads(2, of=9),
    )
    assert said == (
        "identical inputs, different output: attention of layer 5, request r03.05, position 41, head 2; "
        "1 ULP in 3 of 64 elements; not in the control"
    )


def test_what_a_control_shows_too(told: Callable[..., str]) -> None:
    assert told(HIDDEN, LOGITS, "also-in-control").endswith("; also in the control")
    assert "control" not in told(HIDDEN, LOGITS)


@pytest.mark.parametrize(
    ("numbers", "of", "words"),
    [
        ((0, 1, 2, 3), 9, "heads 0–3 of 9;"),
        ((0, 2, 3, 8), 9, "heads 0, 2–3, 8 of 9;"),
        ((0, 2, 4, 6, 8), 10, "5 of 10 heads, the first 0;"),
        ((0, 1, 2), 3, "all 3 heads;"),
        ((0,), 1, "position 5; 1 ULP"),
    ],
)
def test_heads_are_named(told: Callable[..., str], numbers: tuple[int, ...], of: int, words: str) -> None:
    assert words in told(attention(5, "value"), attention(5, "output"), **heads(*numbers, of=of))


@pytest.mark.parametrize(
    ("after", "before", "words"),
    [
        (attention(4, "output"), attention(5, "query"), "identical attention output of layer 4, different"),
        (HIDDEN, LOGITS, "identical final hidden states, different logits: lm_head"),
        (LOGITS, TOKEN, "identical logits, different sampled token: sampler"),
        (None, INPUT_IDS, "different inputs: input ids, request r00.00"),
        (None, attention(3, "key"), "different key of layer 3, nothing compared upstream of it"),
        ("x.1.moe/hidden_states", "x.1.moe/router_logits", "identical"),
        ("x.1.moe/expert_ids", "x.1.moe/output", "experts of layer 1"),
        ("x.1.moe/router_logits", "x.1.moe/expert_ids", "router of layer 1"),
        ("x.1.mixer/projected_states", "x.1.mixer/output", "state-space op of layer 1"),
    ],
)
def test_what_is_blamed(told: Callable[..., str], after: str | None, before: str, words: str) -> None:
    assert words in told(after, before)


def test_unlike_rows_and_rows_without_payload(told: Callable[..., str]) -> None:
    nothing = {"elements_differ": None, "elements": None}
    assert told(HIDDEN, LOGITS, class_="dtype", **nothing).endswith("; of another dtype")
    assert told(HIDDEN, LOGITS, class_=None, **nothing).endswith("only digests were kept")


def test_one_row_needs_no_table(tmp_path: Path) -> None:
    assert list(rows.blocks(compared(tmp_path, "value", []))) == []
