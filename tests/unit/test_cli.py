"""Every command explains itself, and every mistake is one clear sentence and an exit code."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from altered import PAYLOAD, small
from builders import Plan, write

import localizer
from localizer.cli.main import COMMANDS, localize, main


@dataclass(frozen=True)
class Said:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line of an error."""
        assert self.out == ""
        assert len(self.err.strip().splitlines()) == 1, self.err
        return self.err.lstrip("\n")  # click ends the line of a ^C first


Localize = Callable[..., Said]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Localize:
    """Call `localize` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCALIZER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCALIZER_DEBUG", raising=False)

    def call(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["localize", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Said(int(ended.value.code or 0), captured.out, captured.err)

    return call


# -- help -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(run: Localize, name: str) -> None:
    for option in ("--help", "-h"):
        said = run(name, option)
        assert (said.code, said.err) == (0, "")
        assert said.out.startswith(f"Usage: localize {name} ")
    command = importlib.import_module(f"localizer.cli.{name}").command
    assert (command.help or "").splitlines()[0] == COMMANDS[name]
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts} has no help"


def test_help_lists_every_command(run: Localize) -> None:
    said = run("--help")
    assert said.code == 0
    for name, summary in COMMANDS.items():
        assert name in said.out
        assert " ".join(summary.split()) in " ".join(said.out.split())


def test_every_module_of_a_command_is_listed() -> None:
    context = click.Context(localize)
    assert localize.list_commands(context) == list(COMMANDS)
    folder = Path(localizer.__file__).parent / "cli"
    with_command = {path.stem for path in folder.glob("*.py") if "@click.command(" in path.read_text()}
    assert with_command == set(COMMANDS)


def test_version(run: Localize) -> None:
    assert run("--version").out == f"localize, version {localizer.__version__}\n"


def test_no_command_shows_the_help(run: Localize) -> None:
    said = run()
    assert said.code == 2
    assert "Usage: localize" in said.out + said.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("destroy",),
        ("--what",),
        ("verify",),
        ("verify", "a", "b"),
        ("capture", "a"),
        ("show", "a", "--format", "x"),
    ],
)
def test_usage_errors(run: Localize, arguments: tuple[str, ...]) -> None:
    said = run(*arguments)
    assert (said.code, said.out) == (2, "")
    assert "Error:" in said.err


# -- naming captures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [("show", "nobody"), ("verify", "nobody"), ("diff", "candidate", "nobody")]
)
def test_an_unknown_name_lists_those_that_exist(
    run: Localize, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    small(tmp_path / "captures")
    small(tmp_path / "captures", name="parent")
    said = run(*arguments)
    assert said.code == 2
    assert said.sentence == "localize: There is no capture 'nobody'; there are: candidate, parent.\n"


def test_no_captures_at_all(run: Localize) -> None:
    assert "captures holds no captures yet" in run("show", "nobody").sentence
    said = run("list")
    assert (said.code, said.err) == (0, "")
    assert (
        said.out == "There are no captures in captures; make one with localize capture NAME --model MODEL.\n"
    )


# -- verify, show, list -----------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Captures `whole`, `killed` and `broken`."""
    root = tmp_path / "captures"
    small(root, name="whole")
    small(root, name="killed", manifest=False)
    (small(root, name="broken") / "manifest.json").write_text("{")
    return root


def test_verify(run: Localize, three: Path) -> None:
    said = run("verify", "whole")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("sound and complete: captures/whole/0001: 6 files, ")
    said = run("verify", "killed")
    assert (said.code, said.err) == (3, "")
    assert said.out.startswith("sound but incomplete: ")
    said = run("verify", "broken")
    assert (said.code, said.err) == (1, "")
    assert said.out.startswith("damaged: ")
    assert "manifest.json" in said.out


def test_verify_finds_a_flipped_bit(run: Localize, three: Path) -> None:
    path = three / "whole" / "0001" / PAYLOAD
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)
    said = run("verify", "whole")
    assert said.code == 1
    assert PAYLOAD in said.out


def test_show(run: Localize, three: Path) -> None:
    said = run("show", "whole")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("whole/0001  complete\n")
    for text in ("toy", "model.layers.0.self_attn.attn/query", "matrix 1,2 x 1"):
        assert text in said.out
    said = run("show", "killed")
    assert said.code == 0
    assert said.out.startswith("killed/0001  incomplete\n")
    said = run("show", "broken")
    assert said.code == 2
    assert "manifest.json is damaged" in said.sentence


def test_show_as_json(run: Localize, three: Path) -> None:
    for name, complete in (("whole", True), ("killed", False)):
        content = json.loads(run("show", name, "--format", "json").out)
        assert content["open"]["name"] == name
        assert (content["complete"], content["manifest"] is not None) == (complete, complete)


def test_list(run: Localize, three: Path) -> None:
    write(three, Plan(name="whole", number=2))
    said = run("list")
    assert (said.code, said.err) == (0, "")
    lines = [line.split() for line in said.out.splitlines()]
    states = {line[0]: line[-1] for line in lines[1:]}
    assert states == {
        "broken/0001": "damaged",
        "killed/0001": "incomplete",
        "whole/0001": "complete",
        "whole/0002": "complete",
    }


def test_text_from_a_capture_is_not_live(run: Localize, tmp_path: Path) -> None:
    """A capture may come from a stranger: no escape sequence reaches the terminal."""
    small(tmp_path / "captures", vllm="\x1b[2J1.0\nfake line", environment={"VLLM_X": "\x1b]0;title\x07"})
    for arguments in (("list",), ("show", "candidate")):
        said = run(*arguments)
        assert said.code == 0
        assert not {"\x1b", "\x07"} & set(said.out)
        assert "\nfake line" not in said.out


# -- captures that never start ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--matrix", "0,0"), "The matrix '0,0' is not a list of batch sizes"),
        (("--matrix", ""), "is not a list of batch sizes"),
        (("--engine", "enforce_eager"), "--engine 'enforce_eager' is not KEY=VALUE"),
        (("--env", "=1"), "--env '=1' is not KEY=VALUE"),
        (("--engine", "worker_extension_cls=x"), "leave worker_extension_cls out of --engine"),
        (("--layers", "last"), "--layers 'last': 'last' is neither an index nor a range"),
        (("--layers", "9-1"), "runs backwards"),
        (("--python", "no-such-python"), "There is no interpreter 'no-such-python'"),
        (("--model", "./nothing"), "There is no model './nothing'"),
        (("--model", "."), ". holds no config.json"),
    ],
)
def test_requests_that_cannot_be_met(run: Localize, arguments: tuple[str, ...], says: str) -> None:
    model = () if "--model" in arguments else ("--model", "tiny")
    said = run("capture", "parent", *model, *arguments)
    assert said.code == 2
    error = [line for line in said.err.splitlines() if line.startswith("localize: ")]
    assert len(error) == 1
    assert says in error[0]
    assert not Path("captures").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--repeats", "0"), ("--prompt-tokens", "0"), ("--max-tokens", "-1"), ("--seed", "-1"),
        ("--repeats", "x"), ("--payload", "some"), ("--overlay", "nothing"), ("--out", "file"),
    ],
)  # fmt: skip
def test_options_out_of_range(run: Localize, arguments: tuple[str, ...]) -> None:
    Path("file").write_text("")
    said = run("capture", "parent", "--model", "tiny", *arguments)
    assert said.code == 2
    assert "Error:" in said.err
    assert f"'{arguments[0]}'" in said.err


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], str]:
    """An interpreter with or without a vLLM, which cannot be run."""

    def make(vllm: str) -> str:
        path = tmp_path / "python"
        facts = {"python": "3.11.0", "executable": "", "vllm": "1.0", "torch": "", "packages": {}}
        path.write_text(f"#!/bin/sh\necho '{json.dumps(facts | {'vllm_location': vllm})}'\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_an_interpreter_without_vllm(run: Localize, python: Callable[[str], str]) -> None:
    said = run("capture", "parent", "--model", "tiny", "--python", python(""))
    assert said.code == 2
    assert "has no vLLM; install one there" in said.err


def test_an_overlay_that_changes_nothing(run: Localize, python: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "overlay").mkdir()
    command = ("capture", "c", "--model", "tiny", "--python", python(str(tmp_path / "site" / "vllm")))
    assert "The overlay overlay has no vllm/ folder" in run(*command, "--overlay", "overlay").err
    (tmp_path / "overlay" / "vllm").mkdir()
    said = run(*command, "--overlay", "overlay")
    assert said.code == 2
    assert "nothing would change" in said.err


def test_a_folder_that_cannot_be_written(run: Localize, python: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = run("capture", "c", "--model", "tiny", "--python", python(str(tmp_path)), "--out", "file/below")
    assert said.code == 2
    assert "Captures cannot be written to file/below (Not a directory); name a writable folder" in said.err


@pytest.mark.parametrize("name", ["a/b", "..", "0001", ""])
def test_a_name_that_cannot_be_used(
    run: Localize, python: Callable[[str], str], tmp_path: Path, name: str
) -> None:
    said = run("capture", name, "--model", "tiny", "--python", python(str(tmp_path)))
    assert said.code == 2
    assert f"{name!r} cannot name a capture" in said.err


# -- what no command foresees -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (OSError(28, "No space left", "x.txt"), 2, "localize: x.txt cannot be used (No space left)."),
        (OSError("odd"), 2, "localize: A file cannot be used (odd)."),
        (KeyboardInterrupt(), 130, "localize: Stopped."),
        (ZeroDivisionError("oh"), 2, "localize: localizer itself failed (ZeroDivisionError: oh); please"),
    ],
)
def test_unforeseen_errors(
    run: Localize, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, says: str
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("localizer.cli.list.history", fail)
    said = run("list")
    assert said.code == code
    assert said.sentence.startswith(says)


def test_our_own_traceback_is_shown_on_request(run: Localize, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localizer.cli.list.history", lambda root: 1 / 0)
    monkeypatch.setenv("LOCALIZER_DEBUG", "1")
    assert "Traceback" in run("list").err
