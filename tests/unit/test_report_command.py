"""`localize report`: which format goes where, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders import Plan, attention, bump, pair, write
from cases import CASES

from localizer.cli.main import main
from localizer.report.formats import SUFFIXES


@dataclass(frozen=True)
class Said:
    """What a command left: exit code, standard output, standard error."""

    returncode: int
    stdout: bytes
    stderr: bytes


Localize = Callable[..., Said]


@pytest.fixture
def localize(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Localize:
    """Call `localize` in this process."""

    def call(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["localize", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsysbinary.readouterr()
        return Said(int(ended.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with captures of which candidate and parent differ."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "captures"
    changes = {("r01.00", 4, attention(1, "query")): bump()}
    pair(root, changes=changes)
    write(root, Plan(name="parent-2"))
    return tmp_path


@pytest.mark.parametrize(
    ("form", "start"), [("text", b"diverged: "), ("json", b"{"), ("html", b"<!doctype html>")]
)
def test_text_goes_to_standard_output(localize: Localize, folder: Path, form: str, start: bytes) -> None:
    done = localize("report", "candidate", "parent", "--format", form)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(start)
    assert localize("report", "candidate", "parent", "--format", form, "-o", "x").stdout == b""
    assert (folder / "x").read_bytes() == done.stdout


def test_it_is_what_diff_says(localize: Localize, folder: Path) -> None:
    text = localize("diff", "candidate", "parent").stdout
    assert localize("report", "candidate", "parent").stdout == text
    told = json.loads(localize("report", "candidate", "parent", "--format", "json").stdout)
    plain = json.loads(localize("diff", "candidate", "parent", "--format", "json").stdout)
    assert len(told.pop("cells")["requests"]) == 3
    assert told.pop("returned") == {"requests": [], "requests_left_out": 0}
    assert plain.pop("cells") is plain.pop("returned") is None
    assert told == plain


@pytest.mark.parametrize("form", SUFFIXES)
def test_a_file_says_by_its_end_what_it_is(localize: Localize, folder: Path, form: str) -> None:
    if form == "png":
        pytest.importorskip("matplotlib", reason="the extra png is not installed")
    name = f"report{SUFFIXES[form].upper()}"
    for _ in range(2):  # the second time it is replaced
        done = localize("report", "candidate", "parent", "-o", name)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        start = (folder / name).read_bytes()[:4]
        assert (
            start
            == {
                **{"text": b"dive", "json": b'{\n "', "html": b"<!do", "png": b"\x89PNG"},
                **{"markdown": b"## d"},
            }[form]
        )


def test_a_report_is_no_check(localize: Localize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("identical", "killed", "models"):
        plan, candidate = CASES[name]
        pair(tmp_path / name, plan, **candidate)
        done = localize("report", "candidate", "parent", "--out", name, "-o", f"{name}.html")
        assert (done.returncode, done.stderr) == (0, b"")
        assert (tmp_path / f"{name}.html").exists()


def test_it_takes_what_diff_takes(localize: Localize, folder: Path) -> None:
    control = ["--control", "parent-2", "--tolerance", "*/query=ulp:1"]
    told = localize("report", "candidate/0001", "captures/parent/0001", *control, "-o", "x.json")
    assert (told.returncode, told.stderr) == (0, b"")
    found = json.loads((folder / "x.json").read_bytes())
    assert found["attribution"] == "candidate-only"
    assert found["first"]["within_tolerance"] is True
    assert found["cells"]["requests"][0]["cells"][0]["within_tolerance"] is True
    assert localize("attach", "candidate", "parent", "-o", "x.zip").returncode == 0
    assert zipfile.is_zipfile(folder / "x.zip")
    for arguments in (["x.zip:candidate", "x.zip:parent"], ["--within", "candidate"]):
        done = localize("report", *arguments, "--format", "html")
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"<h1>" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("candidate",), "Name the parent's capture as well"),
        (("candidate", "parent", "--within"), "--within compares one capture with itself"),
        (("candidate", "nobody"), "There is no capture 'nobody'"),
        (("candidate", "parent", "--format", "png"), "name its file with -o FILE"),
        (("candidate", "parent", "-o", "captures"), "is a directory"),
        (("candidate", "parent", "-o", "nowhere/x.html"), "nowhere/x.html cannot be used"),
        (("candidate", "parent", "--format", "x"), "'x' is not one of"),
        (("candidate", "parent", "--tolerance", "x"), "--tolerance 'x': "),
    ],
)
def test_a_mistake_is_a_sentence(
    localize: Localize, folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = localize("report", *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert words in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_it_starts_without_torch_vllm_and_matplotlib(folder: Path) -> None:
    script = (
        "import sys\n"
        "from localizer.cli.main import main\n"
        "sys.argv = ['localize', 'report', 'candidate', 'parent', '-o', 'x.html']\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert done.code in (0, None), done.code\n"
        "loaded = {'torch', 'vllm', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
