"""action.yml: sound as a file, safe as shell, and its steps do what they say on captures that are there.

The steps are run by a double of GitHub's runner (actions_double.py), the comment goes to one of its API
(github_double.py), and in place of `localize run`, which starts engines, its command line is only read.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from actions_double import Runner
from builders import Plan, attention, bump, pair
from command_line import understood
from github_double import TOKEN, Double, serving

ROOT = Path(__file__).parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
SHELL = {step["name"]: step for step in STEPS if "run" in step}
HOSTILE = "x\"; touch pwned; $(touch pwned) `touch pwned` '@octocat' \\ #"
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def test_it_is_a_composite_action_as_github_wants_it() -> None:
    assert ACTION.keys() == {"name", "description", "inputs", "outputs", "runs"}
    assert ACTION["runs"].keys() == {"using", "steps"}
    assert ACTION["runs"]["using"] == "composite"
    for given in ACTION["inputs"].values():
        assert given.keys() == {"description", "default"}
        assert isinstance(given["default"], str)
    for given in ACTION["outputs"].values():
        assert given.keys() == {"description", "value"}
    known = {"name", "id", "if", "shell", "env", "run", "uses", "with"}
    for step in STEPS:
        assert step.keys() <= known
        assert ("run" in step) != ("uses" in step)
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
        assert "run" not in step or step["shell"] == "bash"
        assert all(isinstance(value, str) for value in step.get("env", {}).values())


def test_expressions_name_what_is_there() -> None:
    text = (ROOT / "action.yml").read_text()
    assert {it for it in re.findall(r"inputs\.([\w-]+)", text)} == set(ACTION["inputs"])
    named = {it for it in re.findall(r"steps\.([\w-]+)\.", text)}
    assert named <= {step.get("id") for step in STEPS}


@pytest.mark.parametrize("name", SHELL)
def test_no_input_is_shell_text(name: str) -> None:
    script = SHELL[name]["run"]
    assert "${{" not in script
    used = set(re.findall(r"\$\{?([A-Z_]+)", script))
    assert used <= set(SHELL[name].get("env", {})) | {
        "GITHUB_OUTPUT",
        "GITHUB_STEP_SUMMARY",
        "GITHUB_ACTION_PATH",
    }


@pytest.mark.parametrize("name", SHELL)
def test_the_shell_is_sound(name: str) -> None:
    script = SHELL[name]["run"]
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if not SHELLCHECK.exists():
        pytest.skip("shellcheck is not there")
    done = subprocess.run(
        [SHELLCHECK, "--shell=bash", "--severity=style", "-"],
        input=script,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


# -- its steps, run ---------------------------------------------------------------------------------------


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that notes what is asked of it, and carries out all but `localize run` and pip."""
    shim = tmp_path / "shim"
    code = (
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"with open({str(tmp_path / 'asked')!r}, 'a') as log: log.write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "if sys.argv[1:3] == ['-P', '-c']: exec(sys.argv[3]); sys.exit(0)\n"
        "if sys.argv[1:4] == ['-P', '-m', 'pip']: sys.exit(0)\n"
        "if sys.argv[1:4] != ['-P', '-m', 'localizer']: sys.exit(9)\n"
        "sys.argv = ['localize', *sys.argv[4:]]\n"
        "if sys.argv[1] == 'run': print(os.environ.get('RUN_SAYS', ''), file=sys.stderr)\n"
        "if sys.argv[1] == 'run': sys.exit(int(os.environ.get('RUN_ENDS_WITH', '0')))\n"
        "from localizer.cli.main import main; main()\n"
    )
    shim.write_text(code)
    shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    return shim


def asked(folder: Path) -> list[list[str]]:
    """The command lines of localize, each of which the real one can read."""
    lines = [json.loads(line) for line in (folder / "asked").read_text().splitlines()]
    found = [line[3:] for line in lines if line[1:3] == ["-m", "localizer"]]
    for name, *arguments in found:
        understood(name, arguments)
    return found


@pytest.fixture
def double() -> Iterator[Double]:
    made = Double()
    with serving(made):
        yield made


def job(folder: Path, python: Path, double: Double | None = None, ends: int = 0, **inputs: str) -> Runner:
    given = {name.replace("_", "-"): value for name, value in inputs.items()} | {"python": str(python)}
    base = double.base if double is not None else ""
    environment = {"GITHUB_API_URL": base, "GITHUB_ACTION_PATH": str(ROOT), "GITHUB_TOKEN": ""}
    environment["RUN_ENDS_WITH"] = str(ends)
    work = folder / "work space"
    work.mkdir(exist_ok=True)
    uploaded = {"upload": {"artifact-url": "https://github.test/artifacts/1"}}
    return Runner(ACTION, work, given, environment, uploaded)


def test_the_committed_pair(tmp_path: Path, python: Path, double: Double) -> None:
    made = job(tmp_path, python, double, captures=str(ROOT / "captures"), post="o/r#5", token=TOKEN)
    assert made.go() == 0, made.said
    assert made.ran == ["Pack the evidence", "Upload the archive", "Comment on the pull request"]
    assert made.output("verdict") == "diverged"
    assert made.output("artifact-url") == "https://github.test/artifacts/1"
    assert made.given["path"] == made.output("archive")
    assert Path(made.output("archive")).read_bytes()[:2] == b"PK"
    (comment,) = double.comments
    assert "model.layers.5.self_attn.attn/query" in comment["body"]
    assert "[download](<https://github.test/artifacts/1>)" in comment["body"]
    assert made.summary.read_text().startswith(
        "<!-- localizer:comment -->\n\n## localizer: diverged, no control\n"
    )
    assert TOKEN not in made.said + made.summary.read_text() + Path(made.output("comment")).read_text()
    assert [line[0] for line in asked(tmp_path)] == ["attach", "attach"]


def test_without_a_pull_request_nothing_is_posted(tmp_path: Path, python: Path) -> None:
    pair(tmp_path / "captures", Plan())
    made = job(tmp_path, python, captures=str(tmp_path / "captures"), artifact="", fail_on_divergence="true")
    assert made.go() == 0, made.said
    assert made.ran == ["Pack the evidence", "Judge"]
    assert made.output("verdict") == "identical"


def test_it_can_fail_on_divergence(tmp_path: Path, python: Path) -> None:
    pair(tmp_path / "captures", Plan(), changes={("r01.00", 4, attention(1, "output")): bump()})
    made = job(
        tmp_path, python, captures=str(tmp_path / "captures"), fail_on_divergence="true", redact="false"
    )
    assert made.go() == 1
    assert "::error::localizer: the verdict is diverged" in made.said
    assert "--no-redact" in asked(tmp_path)[0]


def test_a_trusted_job_comments_on_an_archive_made_elsewhere(
    tmp_path: Path, python: Path, double: Double
) -> None:
    pair(tmp_path / "captures", Plan())
    first = job(tmp_path, python, captures=str(tmp_path / "captures"))
    assert first.go() == 0
    archive = tmp_path / "downloaded.zip"
    archive.write_bytes(Path(first.output("archive")).read_bytes())
    shutil.rmtree(tmp_path / "captures")
    shutil.rmtree(first.folder)
    given = {"archive": str(archive), "attachment_url": "https://github.test/artifacts/2"}
    made = job(tmp_path, python, double, post="o/r#5", token=TOKEN, config="ignored.toml", **given)
    assert made.go() == 0, made.said
    assert made.ran == ["Pack the evidence", "Comment on the pull request"]
    assert "artifacts/2" in double.comments[0]["body"]
    assert "run" not in [line[0] for line in asked(tmp_path)]


@pytest.mark.parametrize("ends", [0, 1, 3, 2])
def test_a_configuration_is_run(tmp_path: Path, python: Path, ends: int) -> None:
    """No engine is started: what localize run is asked is read, and the run attach wants is not there."""
    made = job(tmp_path, python, ends=ends, config="-odd name.toml", candidate_ref="pr/1", parent_ref="main",
               repository="/src/vllm", install="true")  # fmt: skip
    assert made.go() == 2
    wanted = ["Install localizer", "Run both sources", *(["Pack the evidence"] if ends != 2 else [])]
    assert made.ran == wanted
    run = asked(tmp_path)[0]
    assert run == ["run", "--set", "candidate.git=/src/vllm@pr/1", "--set", "parent.git=/src/vllm@main",
                   "--out", "captures", "--", "-odd name.toml"]  # fmt: skip
    if ends != 2:
        assert "holds no runs" in made.said
        assert "--run" in asked(tmp_path)[1]


COMMANDS = "::add-mask::e\n  ::set-output name=verdict::identical\nx ##[set-output name=verdict]identical"


def listened(said: str) -> list[str]:
    """The lines of a step in which GitHub's runner would look for commands."""
    heard, stopped = [], ""
    for line in said.splitlines():
        if stopped:
            stopped = "" if line.strip() == f"::{stopped}::" else stopped
        elif line.startswith("::stop-commands::"):
            stopped = line.removeprefix("::stop-commands::")
        else:
            heard.append(line)
    return heard


@pytest.mark.parametrize("ends", [0, 2])
def test_what_localize_prints_is_no_command_of_the_runner(tmp_path: Path, python: Path, ends: int) -> None:
    made = job(tmp_path, python, ends=ends, config="x.toml")
    made.environment = {**made.environment, "RUN_SAYS": COMMANDS}
    assert made.go() == 2
    assert COMMANDS in made.said
    assert not [line for line in listened(made.said) if "::" in line or "##[" in line]
    words = re.findall("::stop-commands::([0-9a-f]{64})", made.said)
    assert len(words) == len(set(words)) == len(made.ran)
    for name in ("Run both sources", "Pack the evidence", "Comment on the pull request"):
        script = SHELL[name]["run"]
        assert script.startswith("exec 2>&1\n")  # standard error might come later than the last line
        assert script.index("::stop-commands::") < script.index("localizer")


def test_no_file_of_the_workspace_is_imported() -> None:
    """What an artifact holds lies there, and a job that may write comments must not run it."""
    calls = [call for step in SHELL.values() for call in re.findall(r'"\$PYTHON" (.*)', step["run"])]
    assert len(calls) > 6
    assert all(call.startswith("-P ") for call in calls)


@pytest.mark.parametrize("name", sorted(ACTION["inputs"].keys() - {"python", "token", "install"}))
def test_no_input_can_run_a_command(tmp_path: Path, python: Path, double: Double, name: str) -> None:
    pair(tmp_path / "captures", Plan())
    given = {
        "captures": str(tmp_path / "captures"),
        "post": "o/r#5",
        "token": TOKEN,
        name.replace("-", "_"): HOSTILE,
    }
    made = job(tmp_path, python, double, **given)
    made.go()
    assert not list(tmp_path.rglob("pwned"))


# -- the documentation ------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "github.md").read_text()


def test_the_workflow_in_the_documentation_is_sound() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {}
    capture, comment = workflow["jobs"]["capture"], workflow["jobs"]["comment"]
    assert capture["permissions"] == {"contents": "read"}
    assert comment["permissions"] == {"pull-requests": "write"}
    assert "token" not in json.dumps(capture["steps"])
    assert "secrets" not in text
    for job in (capture, comment):
        uses = [step for step in job["steps"] if step.get("uses", "").startswith("OWNER/localizer")]
        assert len(uses) == 1
        assert uses[0]["with"].keys() <= ACTION["inputs"].keys()
        assert all("${{" not in step.get("run", "") for step in job["steps"])


def test_every_input_and_output_is_documented() -> None:
    assert not [
        name
        for name in (*ACTION["inputs"], *ACTION["outputs"])
        if f"`{name}`" not in PAGE and f"`{name}:" not in PAGE
    ]
