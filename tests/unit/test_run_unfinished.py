"""Captures that did not finish: at every step of a run they are that, no noise, and are made anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from doubles import FAULT, QUERY, Making, Vllm, candidates, going, text_of

from localizer.report.captures import history
from localizer.run.config import Config
from localizer.store import runs

SHORT: dict[str, Any] = {
    "state": "incomplete",
    "reasons": ("request r01.01 did not finish",),
    "unfinished": frozenset({"r01.01"}),
    "outputs": {"r01.01": []},
}
TORN = {name: SHORT[name] for name in ("state", "reasons")}
LACKING = TORN | {"absent": frozenset({QUERY})}


def once(name: str, how: dict[str, Any], **candidate: Any) -> Making:
    """The first capture of that name does not finish."""

    def makes(made: str, number: int) -> dict[str, Any]:
        changes = candidate if made.startswith("candidate") else {}
        return changes | (how if (made, number) == (name, 1) else {})

    return makes


@pytest.mark.parametrize("name", ["parent-untapped", "parent-untapped-2", "candidate-untapped-2"])
@pytest.mark.parametrize("fault", [{}, FAULT], ids=["equal", "fault"])
def test_a_run_without_taps(config: Config, tmp_path: Path, name: str, fault: dict[str, Any]) -> None:
    found, _ = going(config, tmp_path, Vllm(once(name, SHORT, **fault)))
    source = name.partition("-")[0]
    assert found.verdict == "inconclusive"
    assert [(reason.code, reason.source) for reason in found.reasons] == [("run-unfinished", source)]
    assert {item.source: item.differs for item in found.untapped}[source] == "incomplete"
    assert [item.differs for item in found.observer] == ["same", "same"], "with the one that finished"
    said = text_of(tmp_path)
    assert said.startswith(f"inconclusive: a run of the {source} did not finish ({name}/0001: request r01.01")
    assert "the same command makes it anew" in said.splitlines()[0]
    assert f"whether the {source} is reproducible cannot be told" in said
    assert "NOT reproducible" not in said
    again = Vllm(candidates(**fault))
    found, watcher = going(config, tmp_path, again)
    assert again.made == [name]
    assert any(text.startswith("Resuming") for text in watcher.said)
    assert (found.verdict, found.reasons) == ("diverged" if fault else "identical", [])
    assert len(runs.folders(tmp_path / "captures")) == 1
    third = Vllm(candidates(**fault))
    going(config, tmp_path, third)
    assert len(third.made) == (10 if fault else 8), "after a finished run the next begins"
    assert len(runs.folders(tmp_path / "captures")) == 2


def test_the_only_run_without_taps(config: Config, tmp_path: Path) -> None:
    one = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, untapped=1))
    found, _ = going(one, tmp_path, Vllm(once("parent-untapped", SHORT)))
    assert (found.verdict, [reason.code for reason in found.reasons]) == ("inconclusive", ["run-unfinished"])
    assert "whether taps are neutral on the parent cannot be told" in text_of(tmp_path)
    assert "Taps did not change what the parent" not in text_of(tmp_path)


@pytest.mark.parametrize("name", ["parent", "candidate"])
def test_the_two_that_are_compared(config: Config, tmp_path: Path, name: str) -> None:
    found, _ = going(config, tmp_path, Vllm(once(name, TORN)))
    assert found.verdict == "inconclusive"
    assert {(reason.code, reason.source) for reason in found.reasons} == {("incomplete-capture", name)}
    again = Vllm(candidates())
    found, _ = going(config, tmp_path, again)
    assert (again.made, found.verdict) == ([name], "identical")


@pytest.mark.parametrize("name", ["parent-2", "candidate-2"])
def test_further_runs_with_taps(config: Config, tmp_path: Path, name: str) -> None:
    found, _ = going(config, tmp_path, Vllm(once(name, TORN)))
    assert (found.verdict, found.first_pass.verdict) == ("inconclusive", "identical")
    assert [reason.code for reason in found.reasons] == ["run-unfinished"]
    assert "did not finish" in text_of(tmp_path).splitlines()[0]
    again = Vllm(candidates())
    found, _ = going(config, tmp_path, again)
    assert (again.made, found.verdict) == ([name], "identical")


def test_a_control_attributes_nothing(config: Config, tmp_path: Path) -> None:
    found, _ = going(config, tmp_path, Vllm(once("parent-2", TORN, **FAULT)))
    assert (found.verdict, found.attribution) == ("diverged", "no-control")
    assert [(reason.code, reason.source) for reason in found.reasons] == [("run-unfinished", "parent")]
    again = Vllm(candidates(**FAULT))
    found, _ = going(config, tmp_path, again)
    assert (again.made, found.attribution) == (["parent-2"], "candidate-only")


def test_a_witness_is_made_anew(config: Config, tmp_path: Path) -> None:
    def makes(name: str, number: int) -> dict[str, Any]:
        fault = FAULT if name.startswith("candidate") else {}
        return fault | (LACKING if name.startswith("candidate-witness") else {})

    found, _ = going(config, tmp_path, Vllm(makes))
    assert (found.verdict, found.first_pass.verdict) == ("inconclusive", "diverged")
    assert [reason.code for reason in found.reasons] == ["witness-unfinished"]
    assert "no witness run finished" in text_of(tmp_path).splitlines()[0]
    again = Vllm(candidates(**FAULT))
    found, _ = going(config, tmp_path, again)
    assert (again.made, found.verdict) == (["candidate-witness"], "diverged")


def test_the_history_tells_a_result_that_will_be_replaced(config: Config, tmp_path: Path) -> None:
    going(config, tmp_path, Vllm(once("parent-untapped", SHORT)))
    (line,) = (line for line in history(tmp_path / "captures").splitlines() if line.startswith("runs/"))
    assert line.endswith("7         inconclusive, not finished")
