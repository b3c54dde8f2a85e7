"""`localize diff`: what is printed where, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from builders import Plan, attention, bump, pair, write
from cases import CASES

ROOT = Path(__file__).parents[2]


def localize(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "localizer", "diff", *arguments], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.parametrize(("name", "code"), [("identical", 0), ("diverged", 1), ("killed", 3), ("models", 3)])
def test_exit_codes(tmp_path: Path, name: str, code: int) -> None:
    plan, candidate = CASES[name]
    pair(tmp_path / "captures", plan, **candidate)
    done = localize(tmp_path, "candidate", "parent")
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.split(":")[0] in ("identical", "diverged", "inconclusive")


def test_captures_are_named_by_name_number_or_path(tmp_path: Path) -> None:
    one, other = pair(tmp_path / "elsewhere")
    write(tmp_path / "elsewhere", Plan(number=2, outputs={"r00.00": [15, 15, 15, 15]}))
    assert localize(tmp_path, "candidate", "parent", "--out", "elsewhere").returncode == 1
    assert localize(tmp_path, "candidate/0001", "parent", "--out", "elsewhere").returncode == 0
    done = localize(tmp_path, str(one), str(other), "--format", "json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["captures"]["candidate"]["path"] == str(one)


def test_controls_change_neither_verdict_nor_exit_code(tmp_path: Path) -> None:
    changes = {("r01.00", 4, attention(1, "query")): bump()}
    root = tmp_path / "captures"
    pair(root, changes=changes)
    write(root, Plan(name="parent-2"))
    write(root, Plan(name="parent-3", changes=changes))
    for controls, code, attribution, words in [
        (["parent-2"], 1, "candidate-only", "control: not in the control"),
        (["parent-2", "parent-3"], 1, "also-in-control", "control: also in the control"),
    ]:
        options = [word for control in controls for word in ("--control", control)]
        done = localize(tmp_path, "candidate", "parent", *options)
        assert (done.returncode, done.stderr) == (code, "")
        assert words in done.stdout
        tree = json.loads(localize(tmp_path, "candidate", "parent", *options, "--format", "json").stdout)
        assert (tree["verdict"], tree["attribution"]) == ("diverged", attribution)
        assert [item["label"] for item in tree["controls"]["captures"]] == [f"{it}/0001" for it in controls]
    done = localize(tmp_path, "parent", "parent-2", "--control", "parent-3")
    assert (done.returncode, done.stdout.split(":")[0]) == (0, "identical")
    assert "nothing to attribute" in done.stdout


def test_what_is_no_control_is_one_sentence(tmp_path: Path) -> None:
    root = tmp_path / "captures"
    pair(root, Plan(model_files={"a": "aa"}))
    write(root, Plan(name="other", model_files={"a": "bb"}))
    damaged = next(write(root, Plan(name="damaged", model_files={"a": "aa"})).rglob("rows-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for control, words in [
        ("parent", "parent itself"),
        ("nobody", "There is no capture 'nobody'; there are: candidate, damaged, other, parent."),
        ("damaged", "rows-00000"),
        ("other", "another model"),
    ]:
        done = localize(tmp_path, "candidate", "parent", "--control", control)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
        assert words in done.stderr


def test_within_takes_one_capture(tmp_path: Path) -> None:
    root = tmp_path / "captures"
    changes = {("r02.00", 4, attention(1, "query")): bump()}
    pair(root, Plan(repeats=2), changes=changes)
    for arguments in (["--within", "candidate"], ["candidate", "--within"]):
        done = localize(tmp_path, *arguments)
        assert (done.returncode, done.stderr) == (1, "")
        assert "the row of request r02.00 (step 10, decode) differs" in done.stdout
        assert "of request r00.00 (step 2)" in done.stdout
    assert localize(tmp_path, "--within", "parent").returncode == 0
    for arguments in (["--within", "candidate", "parent"], ["--within", "parent", "--control", "parent"], []):
        done = localize(tmp_path, *arguments)
        assert (done.returncode, done.stdout) == (2, "")


def test_the_plan_comes_first(tmp_path: Path) -> None:
    pair(tmp_path / "captures")
    done = localize(tmp_path, "candidate", "parent", "--explain")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Plan: align\n")
    assert done.stdout.endswith(localize(tmp_path, "candidate", "parent").stdout)
    tree = json.loads(localize(tmp_path, "candidate", "parent", "--explain", "--format", "json").stdout)
    assert tree["plan"]["align"]["paired"] == 18


def test_damage_is_one_sentence(tmp_path: Path) -> None:
    pair(tmp_path / "captures")
    file = next((tmp_path / "captures" / "parent").rglob("rows-*"))
    file.write_bytes(file.read_bytes()[:-1])
    done = localize(tmp_path, "candidate", "parent")
    assert (done.returncode, done.stdout) == (2, "")
    assert "rows-00000.safetensors" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [("nobody", "parent"), ("candidate",), ("candidate", "parent", "--format", "x")]
)
def test_usage_errors(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    pair(tmp_path / "captures")
    done = localize(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("given", ["*/query=ulp:1", "*=abs:1e9|rel:1e9"])
def test_a_tolerance_never_changes_the_exit_code(tmp_path: Path, given: str) -> None:
    plan, candidate = CASES["diverged"]
    pair(tmp_path / "captures", plan, **candidate)
    done = localize(tmp_path, "candidate", "parent", "--tolerance", given, "--format", "json")
    assert (done.returncode, done.stderr) == (1, "")
    printed = json.loads(done.stdout)
    assert (printed["verdict"], printed["first"]["within_tolerance"]) == ("diverged", True)


@pytest.mark.parametrize("given", ["ulp:1", "*=", "*=ulp:x", "*=near:1", "*=abs:-1"])
def test_a_malformed_tolerance_is_one_sentence(tmp_path: Path, given: str) -> None:
    pair(tmp_path / "captures")
    done = localize(tmp_path, "candidate", "parent", "--tolerance", given)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"--tolerance {given!r}: " in done.stderr


def test_it_starts_without_torch_vllm_and_rich(tmp_path: Path) -> None:
    pair(tmp_path / "captures")
    script = (
        "import sys\n"
        "from localizer.cli.main import main\n"
        "sys.argv = ['localize', 'diff', 'candidate', 'parent']\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert done.code == 0, done.code\n"
        "loaded = {'torch', 'vllm', 'rich'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
