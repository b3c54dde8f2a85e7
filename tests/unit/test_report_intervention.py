"""How the answer of an intervention is told: gold files of text and JSON, and every sentence."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import golden
import pytest
from phased import CASES, taken

from localizer.diff.intervention import Intervened, judge
from localizer.report.captures import details
from localizer.report.intervention import render, tree
from localizer.report.limits import sentence

Made = Callable[[str], Intervened]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    """Makes the answer of a case, always under the relative path `captures`."""

    def make(name: str) -> Intervened:
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        return judge(taken(name, Path("captures")))

    return make


def printed(style: str, answer: Intervened) -> str:
    stream = io.StringIO()
    render(style, answer, stream)
    return stream.getvalue()


@pytest.mark.parametrize("name", ["diverged", "not-back", "never-ran", "prefix-cache"])
def test_the_report(made: Made, name: str) -> None:
    golden.check(f"intervene-{name}.txt", printed("text", made(name)))


def test_the_json(made: Made) -> None:
    text = printed("json", made("diverged"))
    golden.check("intervene-diverged.json", text)
    assert text.isascii()
    assert json.loads(text)["changed"]["verdict"] == "diverged"


def test_every_sentence(made: Made) -> None:
    """Headline, whether it came back, changes, and reasons, of all cases."""
    lines = []
    for name in CASES:
        answer = made(name)
        head = printed("text", answer).split("\n\n")[0]
        lines += [f"# {name}", head, *(f"reason: {sentence(limit)}." for limit in answer.reasons), ""]
    golden.check("intervene-sentences.txt", "\n".join(lines))


def test_nothing_of_a_capture_becomes_live(made: Made) -> None:
    answer = made("hostile")
    assert not {"\x1b", "\u202e"} & set(printed("text", answer))
    assert printed("json", answer).isascii()
    assert "2 more" in sentence(answer.reasons[0])


@pytest.mark.parametrize("name", ["diverged", "no-op", "killed"])
def test_claims_do_not_reach_past_what_ran(made: Made, name: str) -> None:
    scope = tree(made(name))["scope"]
    came_back = "A2 equals A1 wherever both were compared."
    assert (came_back in scope["establishes"]) == (name != "killed")
    assert "The weights as loaded: they were not compared." in scope["does_not_establish"]
    compiled = any(said.startswith("What compiled code does") for said in scope["does_not_establish"])
    assert compiled == (name != "diverged"), "only an engine that is known to run eagerly is not compiled"


def test_show_tells_the_phases(made: Made, tmp_path: Path) -> None:
    lines = details(taken("diverged", tmp_path / "shown")).splitlines()
    assert "  phases        A1 rounds 00-01, B rounds 02-03, A2 rounds 04-05 (patch)" in lines
    assert any(line.startswith("  patch         vllm.model_executor.models.llama:") for line in lines)
