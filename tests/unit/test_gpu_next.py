"""The script for the next run on a GPU does here what it can: its parts are named, its comparisons work."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from builders import Plan, attention, bump, write
from command_line import understood
from interpreted import interpreted

from localizer.store.reader import Capture

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("gpu_next", FOLDER / "gpu_next.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("gpu_capture", "gpu_overhead"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["gpu_next", "gpu_capture", "gpu_overhead"])
def test_they_start(name: str) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER.parent)
    assert done.returncode == 0, done.stderr
    assert "--model" in done.stdout


def test_the_arguments_are_those_of_localize(script: ModuleType, tmp_path: Path) -> None:
    """Every command that it would run is one that `localize capture` takes."""
    options = script.parsed(["--model", "m", "--out", str(tmp_path)])
    options.draft = "d"  # what gpu_capture has beside it
    more = (
        ("--payload", "none", "--row-digest", "device"),
        ("--graph-rows", "4"),
        ("--graph-memory", "1"),
        ("--kv-contents",),
        script.RETURNED,
    )
    for arm in (*script.ARMS, *script.gpu_capture.FIRST):
        for arguments in more:
            _, name, *rest = [*script.gpu_capture.arguments(arm, options), *arguments]
            understood("capture", [name, *rest])
    for arm in script.ALTERNATED:
        understood("capture", ["x", "--model", "m", *script.gpu_overhead.TAPS[arm]])
    assert set(options.parts.split(",")) | {"overhead"} == set(script.PARTS)
    with pytest.raises(SystemExit):
        script.parsed(["--model", "m", "--out", "x", "--parts", "nothing"])


def test_digests_are_held_against_rows_that_another_capture_kept(script: ModuleType, tmp_path: Path) -> None:
    plan = Plan(payload=frozenset(), hashed=True)
    query = attention(1, "query")
    kept = Capture(write(tmp_path, replace(plan, name="kept", payload=None, hashed=False)))
    same = script.against_payload(Capture(write(tmp_path, plan)), kept)
    assert (same["sites"], same["differ"], same["wrong"]) == (len(kept.sites) - 1, 0, {})
    assert same["equal"] > 100
    change = {("r00.00", 2, query): bump((0, 0), 1)}
    other = Capture(write(tmp_path, replace(plan, name="other", changes=change)))
    found = script.against_payload(other, kept)
    assert (found["differ"], list(found["wrong"])) == (1, [query])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton to interpret with")
def test_the_kernel_part() -> None:
    code = f"""
import json, sys
sys.path.insert(0, {str(FOLDER)!r})
import gpu_next
print(json.dumps(gpu_next.digest("cpu", flips=40)))
"""
    found = interpreted(code)
    assert found == {
        "cases": 8, "different": [], "flips": 40, "flips_not_seen": 0, "flips_as_the_reference": True,
    }  # fmt: skip
