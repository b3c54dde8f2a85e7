"""The commands that make captures again are read by the real command line, and ask for the same."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import Plan, write
from command_line import understood
from hypothesis import given
from hypothesis import strategies as st

from localizer.report import reproduce
from localizer.report.safe import escaped
from localizer.store.reader import Capture
from localizer.store.schema import Observer, Open, Overlay, Revision

ROOT = Path(__file__).parents[2]


def read(line: str) -> dict[str, Any]:
    """What the command line understands."""
    program, name, *arguments = shlex.split(line)
    assert program == "localize"
    return understood(name, arguments)


def altered(capture: Capture, **changes: Any) -> Capture:
    capture.open = msgspec.structs.replace(capture.open, **changes)
    return capture


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    return Capture(
        write(tmp_path, Plan(engine={"enforce_eager": True, "x": "a b", "n": "1", "t": {"k": [1]}}))
    )


def test_the_committed_pair(tmp_path: Path) -> None:
    captures = {name: Capture(ROOT / "captures" / name / "0001") for name in ("candidate", "parent")}
    parent, candidate, diff = reproduce.commands(captures).splitlines()
    assert "--overlay /WORK/overlay " in candidate
    assert read(candidate.replace("/WORK/overlay", str(tmp_path)))["overlay"] == tmp_path
    assert (read(parent)["matrix"], read(parent)["seed"]) == ("1,4", 43)
    assert diff == "localize diff candidate parent"
    read(diff)


def test_every_choice_comes_back(capture: Capture) -> None:
    seen = Observer(
        **{"taps": True, "layers": "0,2", "payload": "none", "changes": [], "level": "module"},
        **{"sites": ("*/query", "a'b"), "rows": ("r00.00:0-4",), "transactions": "first:2"},
        **{"weights": False, "kv_contents": True, "probes": ("a.b:C.d",)},
        **{"row_digest": "device", "graph_rows": 64, "graph_memory": 512 << 20, "digest_split": 2},
    )
    git = Overlay(path="/x", files={}, git=Revision(repository="~/vl lm", revision="main", commit="ab12"))
    source = msgspec.structs.replace(capture.open.source, overlay=git)
    work = msgspec.structs.replace(capture.open.workload, sampling={"logprobs": 3})
    environment = {
        "VLLM_X": "1 2",
        "PYTHONPATH": "/y",
        "(others)": "3 not told",
        "VLLM_KEY": "(not recorded)",
    }
    found = read(
        reproduce.line(
            altered(capture, observer=seen, source=source, workload=work, environment=environment),
            python=True,
        )
    )
    assert (found["git"], found["overlay"], found["python"]) == ("~/vl lm@ab12", None, "/usr/bin/python3")
    assert (found["layers"], found["level"], found["payload"]) == ("0,2", "module", "none")
    assert (found["sites"], found["rows"], found["transactions"]) == (
        ("*/query", "a'b"),
        ("r00.00:0-4",),
        "first:2",
    )
    assert (found["logprobs"], found["kv_contents"], found["weights"]) == (3, True, False)
    assert found["probes"] == ("a.b:C.d",)
    assert (found["row_digest"], found["graph_rows"], found["graph_memory"]) == ("device", 64, 512)
    assert found["digest_split"] == 2
    pairs = dict(pair.split("=", 1) for pair in found["engine"])
    assert [json.loads(pairs[key]) for key in ("enforce_eager", "n", "t")] == [True, "1", {"k": [1]}]
    assert pairs["x"] == "a b"
    assert found["environment"] == ("VLLM_X=1 2",)


def test_speculation_comes_back(tmp_path: Path) -> None:
    config = {"speculative_config": {"num_speculative_tokens": 3, "method": "eagle3", "model": "/m"}}
    plan = Plan(speculate=3, draft_files={"model": "cd"}, engine=config)
    found = read(reproduce.line(Capture(write(tmp_path, plan))))
    assert found["speculative_model"] == "toy-draft"
    assert found["speculative"] == ("num_speculative_tokens=3", "method=eagle3")


@given(st.text(min_size=1, max_size=30))
def test_a_shell_takes_hostile_values_as_they_are(text: str) -> None:
    line = reproduce.join(["localize", "capture", text, "--engine", f"a={text}"])
    assert line.isprintable()
    assert shlex.split(line) == ["localize", "capture", escaped(text), "--engine", f"a={escaped(text)}"]


def test_an_open_document_has_no_part_that_is_forgotten() -> None:
    """A field that is new there has to be thought of here."""
    assert {field.name for field in msgspec.structs.fields(Observer)} == {
        *("taps", "layers", "payload", "changes", "level", "sites", "rows", "transactions", "weights"),
        *("kv_contents", "probes", "row_digest", "graph_rows", "graph_memory", "digest_split"),
        "ranks",  # which --engine says
        "graph_taps",  # what was expected, and nobody's choice
    }
    assert "workload" in Open.__struct_fields__
