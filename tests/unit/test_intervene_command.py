"""`localize intervene`: what is refused before anything starts, and reports of captures that are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from builders import Plan, write
from phased import CASES

from localizer.capture.interventions import intervention, parse_patch, told
from localizer.errors import LocalizerError
from localizer.store.tensors import file_digest

PATCH = "vllm.models:Layer.forward=change.py:scaled"


def localize(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "localizer", "intervene", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, which holds `change.py`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "change.py").write_text("def scaled(original, self, x):\n    return original(self, x)\n")
    return tmp_path


def test_a_patch_is_described_by_target_file_and_digest(folder: Path) -> None:
    patch = parse_patch(PATCH)
    assert (patch.target, patch.name) == ("vllm.models:Layer.forward", "scaled")
    assert patch.path == str(folder / "change.py")
    assert patch.xxh3_128 == file_digest(folder / "change.py")


def test_a_path_may_hold_what_separates(folder: Path) -> None:
    (folder / "a=b:c.py").write_text("")
    assert parse_patch("vllm:f=a=b:c.py:name").path == str(folder / "a=b:c.py")


@pytest.mark.parametrize(
    "text",
    [
        "", "vllm:f", "vllm:f=change.py", "vllm.f=change.py:f", "vllm:f=:f", "vllm:=change.py:f",
        ":f=change.py:f", "vllm:f.=change.py:f", "vllm:1f=change.py:f", "vllm:f=change.py:f()",
    ],
)  # fmt: skip
def test_a_patch_that_cannot_be_read(folder: Path, text: str) -> None:
    with pytest.raises(LocalizerError, match=r"is not module:attr=file\.py:name; write for example"):
        parse_patch(text)


def test_a_file_that_is_not_there(folder: Path) -> None:
    with pytest.raises(LocalizerError, match=r"nothing\.py cannot be read \(No such file or directory\)"):
        parse_patch("vllm:f=nothing.py:f")


@pytest.mark.parametrize(
    ("patches", "phase", "everywhere", "keep", "says"),
    [
        ([], None, False, False, "Say what is to be changed in phase B"),
        ([PATCH], "prefix-cache", False, False, "Say what is to be changed in phase B"),
        ([], "prefix-cache", True, False, "--patch-everywhere belongs to --patch"),
        ([], "prefix-cache", False, True, "leave out --keep-prefix-cache"),
        ([PATCH, PATCH], None, False, False, "vllm.models:Layer.forward is patched twice"),
    ],
)
def test_options_that_do_not_fit_together(
    folder: Path, patches: list[str], phase: str | None, everywhere: bool, keep: bool, says: str
) -> None:
    with pytest.raises(LocalizerError, match=says):
        intervention(patches, phase, 1, everywhere=everywhere, keep_prefix_cache=keep)


def test_what_the_source_is_told(folder: Path) -> None:
    asked = intervention([PATCH], None, 3, everywhere=True, keep_prefix_cache=True)
    assert (asked.kind, asked.phases, asked.repeats) == ("patch", ["A1", "B", "A2"], 3)
    assert told(asked) == {
        "kind": "patch",
        "patches": [["vllm.models:Layer.forward", str(folder / "change.py"), "scaled"]],
        "everywhere": True,
        "keep_prefix_cache": True,
    }
    warm = intervention([], "prefix-cache", 1, everywhere=False, keep_prefix_cache=False)
    assert warm.phases == ["warm-up", "A1", "B", "A2"]


@pytest.mark.parametrize(
    ("name", "code"), [("no-op", 0), ("diverged", 1), ("not-back", 1), ("never-ran", 3), ("killed", 3)]
)
def test_a_report_of_a_capture_that_is_there(tmp_path: Path, name: str, code: int) -> None:
    write(tmp_path / "captures", CASES[name])
    done = localize(tmp_path, "--of", "swap")
    assert (done.returncode, done.stderr) == (code, "")
    tree = json.loads(localize(tmp_path, "--of", "swap/0001", "--format", "json").stdout)
    assert done.stdout.startswith(tree["verdict"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Name the capture and the --model, or a capture that is there with --of."),
        (("swap",), "Name the capture and the --model"),
        (("swap", "--of", "swap"), "give no other options but --format, --out"),
        (("--of", "swap", "--repeats", "2"), "give no other options but --format, --out"),
        (("--of", "plain"), "has no phases; make a capture with localize intervene"),
        (("swap", "--model", "tiny"), "Say what is to be changed in phase B"),
        (("swap", "--model", "tiny", "--patch", "x"), "--patch 'x' is not module:attr=file.py:name"),
        (("swap", "--model", "tiny", "--no-taps"), "No such option"),
    ],
)
def test_mistakes(folder: Path, arguments: tuple[str, ...], says: str) -> None:
    write(folder / "captures", Plan(name="plain"))
    done = localize(folder, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert not (folder / "captures" / "swap").exists()
