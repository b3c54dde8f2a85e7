"""What `localize show` says beside the tensors: schedule, weights, compiled code, what ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import Plan, write
from click.testing import CliRunner

from localizer.cli.show import command
from localizer.report.captures import details
from localizer.report.facts import facts_lines, schedule
from localizer.store.reader import Capture
from localizer.store.schema import Checkout, Compiled, Gpu, Identity, Imported, Processor, Weights
from localizer.store.trace import StepTrace

EVERYTHING: dict[str, Any] = {
    "weights": Weights(algorithm="blake2b-128", digest="abc", tensors={"a": "1", "b": "2"}),
    "compiled": Compiled(mode="VLLM_COMPILE", backend="inductor", cache="hit", counters={}, files={"x": "1"}),
    "identity": Identity(
        native={"torch/lib/a.so": "1"},
        python=Imported(files=900, digest="d", changed=[f"vllm/{name}.py" for name in "abcde"]),
        processor=Processor(model="P", flags=["avx2"], capability="AVX2", threads=2),
        gpus=[
            Gpu(name="G", uuid="u", driver="535.1"),
            Gpu(name="H", uuid="v", driver="", cuda="13.0", capability="9.0"),
        ],
        checkout=Checkout(commit="c0ffee", dirty=True),
    ),
}


def test_everything_is_shown(tmp_path: Path) -> None:
    capture = Capture(write(tmp_path, Plan(traced=True, manifested=EVERYTHING)))
    assert list(facts_lines(capture)) == [
        "  schedule      8 steps of at most 2 requests and 6 tokens; graph modes 8 NONE",
        "  weights       2 tensors, blake2b-128 abc",
        "  compiled      VLLM_COMPILE with inductor, cache hit, 1 generated files",
        "  loaded        900 Python files of vLLM, 1 native libraries; "
        "not as installed: vllm/a.py, vllm/b.py, vllm/c.py and 2 more",
        "  processor     P, torch uses AVX2 on 2 threads",
        "  GPU           G u, driver 535.1",
        "  GPU           H v, driver unknown, CUDA 13.0, compute capability 9.0",
        "  checkout      c0ffee, with changes",
    ]
    assert all(line in details(capture).splitlines() for line in facts_lines(capture))


def test_an_older_capture_says_nothing(tmp_path: Path) -> None:
    assert list(facts_lines(Capture(write(tmp_path, Plan())))) == []


def test_an_eager_run_is_not_compiled(tmp_path: Path) -> None:
    plain = Identity(native={}, python=Imported(files=1, digest="d", changed=[]))
    lines = list(facts_lines(Capture(write(tmp_path, Plan(manifested={"identity": plain})))))
    assert lines == [
        "  compiled      not compiled",
        "  loaded        1 Python files of vLLM, 0 native libraries; all Python files as installed",
    ]


def step(**fields: Any) -> StepTrace:
    plain: dict[str, Any] = {"step": 0, "requests": [0], "scheduled": [4], "computed": [0], "cached": [0]}
    plain |= {"drafts": [0], "padded": 4, "graph": "FULL", "batch": {}, "backend": {}}
    return StepTrace(**(plain | fields))


def test_a_summary_of_the_schedule() -> None:
    steps = [
        step(cached=[16], padded=8),
        step(requests=[0, 1], scheduled=[2, 1], computed=[4, 0], cached=[0, 0], drafts=[1, 0], resumed=[0]),
        step(graph="NONE", keys={"a": ["1"]}, values={"a": ["1"]}),
    ]
    assert schedule(steps) == {
        **{"steps": 3, "most_requests": 2, "most_tokens": 4, "padding": 5, "cached": 16, "drafts": 1},
        **{"resumed": 1, "graphs": {"FULL": 2, "NONE": 1}, "kv_contents": 1},
    }
    assert schedule([]) is None


@pytest.mark.parametrize("traced", [True, False])
def test_show_as_json(tmp_path: Path, traced: bool) -> None:
    folder = write(tmp_path, Plan(traced=traced, manifested=EVERYTHING))
    done = CliRunner().invoke(command, [str(folder), "--format", "json"])
    content = json.loads(done.output)
    assert (content["schedule"] or {}).get("steps") == (8 if traced else None)
    assert content["manifest"]["identity"]["checkout"] == {"commit": "c0ffee", "dirty": True}
    assert content["manifest"]["weights"]["tensors"] == {"a": "1", "b": "2"}
