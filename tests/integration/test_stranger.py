"""A stranger's route: localizer from pip into a fresh environment, and an archive that somebody attached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples import FOLDER, ROOT, Done, recorded, run, unlike
from installing import install

from localizer.diff import diff
from localizer.report.json import tree
from localizer.store.names import load


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment of the tests' Python with localizer and what it needs, without extras."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install(folder / "bin" / "python", [ROOT], outside)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def done(environment: Path, home: Path) -> dict[str, Done]:
    """What the commands of docs/examples say there, in a folder with the archive alone."""
    return run([str(environment / "bin" / "localize")], home / "downloads", {"HOME": str(home)})


def test_neither_torch_nor_vllm_nor_this_tree_is_there(environment: Path, home: Path) -> None:
    code = (
        "import importlib.util as it, localizer\n"
        "print([name for name in ('torch', 'vllm', 'httpx', 'matplotlib') if it.find_spec(name)])\n"
        "print(localizer.__file__)"
    )
    command = [environment / "bin" / "python", "-c", code]
    said = subprocess.run(
        command, cwd=home, env={"HOME": str(home)}, capture_output=True, text=True, check=True
    )
    missing, where = said.stdout.splitlines()
    assert missing == "[]"
    assert Path(where).is_relative_to(environment)


def test_the_archive_is_sound(done: dict[str, Done]) -> None:
    assert (done["verify"].returncode, done["verify"].stderr) == (0, "")
    assert done["verify"].stdout.count("sound and complete") == 3


def test_the_verdict_is_that_of_the_machine_that_made_it(
    done: dict[str, Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (done["json"].returncode, done["json"].stderr) == (1, "")
    found = json.loads(done["json"].stdout)
    assert list(unlike(recorded(), found)) == []
    monkeypatch.chdir(ROOT)
    names = [f"docs/examples/smollm2.zip:{name}" for name in ("candidate", "parent", "control-1")]
    candidate, parent, control = (load(Path("captures"), name) for name in names)
    assert found == tree(diff(candidate, parent, [control]))


@pytest.mark.parametrize(("name", "command"), [("smollm2.md", "attach"), ("smollm2.html", "report")])
def test_comment_and_page_are_those_in_the_documentation(
    done: dict[str, Done], home: Path, name: str, command: str
) -> None:
    """Template, style and script of the page are in what pip installs."""
    assert (done[command].returncode, done[command].stderr) == (0, "")
    made = home / "downloads" / "docs" / "examples" / name
    assert made.read_bytes() == (FOLDER / name).read_bytes(), f"{name} is another"
