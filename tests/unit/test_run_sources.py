"""Two sources are two, whatever they are called; a run resumes only under what it was made of."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import Plan, write
from repositories import commit, git

from localizer.errors import LocalizerError
from localizer.run import sources
from localizer.run.config import Config, Source, Workload
from localizer.sources import identity, interpreter
from localizer.store.reader import Capture


def config(candidate: dict[str, Any], parent: dict[str, Any], **more: Any) -> Config:
    return Config(
        workload=Workload(model="tiny"), candidate=Source(**candidate), parent=Source(**parent), **more
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with two overlays, `o` with another name, and a repository with one commit."""
    for name in ("o", "p"):
        (tmp_path / name / "vllm").mkdir(parents=True)
    (tmp_path / "link").symlink_to("o")
    (tmp_path / "repo").mkdir()
    git(tmp_path / "repo", "init", "-q", "-b", "main")
    commit(tmp_path / "repo", {"vllm/a.py": ""})
    return tmp_path


@pytest.mark.parametrize(
    ("candidate", "parent"),
    [
        ({}, {}),
        ({"probes": ["a:b"]}, {}),
        ({"overlay": "o"}, {"overlay": "./o"}),
        ({"overlay": "o/"}, {"overlay": "link", "probes": ["a:b"]}),
        ({"git": "repo@main"}, {"git": "./repo@HEAD"}),
        ({"python": sys.executable}, {}),
        ({"engine": {"seed": 1}}, {}),
        ({"environment": {"PATH": os.environ["PATH"]}}, {}),
    ],
)
def test_one_source_under_two_names_is_refused(
    base: Path, candidate: dict[str, Any], parent: dict[str, Any]
) -> None:
    with pytest.raises(LocalizerError, match="Candidate and parent are the same"):
        sources.check_different(config(candidate, parent, engine={"seed": 1}), base)


@pytest.mark.parametrize(
    ("candidate", "parent"),
    [
        ({"overlay": "o"}, {}),
        ({"overlay": "o"}, {"overlay": "p"}),
        ({"git": "repo@main"}, {}),
        ({"python": "elsewhere/bin/python"}, {}),
        ({"engine": {"seed": 2}}, {}),
        ({"environment": {"NOBODY_READS_THIS": "1"}}, {}),
    ],
)
def test_two_sources(base: Path, candidate: dict[str, Any], parent: dict[str, Any]) -> None:
    sources.check_different(config(candidate, parent, engine={"seed": 1}), base)


def test_names_of_an_interpreter(tmp_path: Path) -> None:
    """Those in one folder are one; two virtual environments of one interpreter are two."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "python").symlink_to(sys.executable)
        (tmp_path / name / "python3").symlink_to("python")
    (tmp_path / "again").symlink_to("one")
    found = [
        interpreter.place(str(tmp_path / name))
        for name in ("one/python", "one/python3", "again/python", "again/../one/python3", "two/python")
    ]
    assert len(set(found[:4])) == 1
    assert found[4] != found[0]
    (tmp_path / "loop").symlink_to("loop")
    assert interpreter.place(str(tmp_path / "loop")) == str(tmp_path / "loop")


def test_a_listing_tells_every_change_of_an_installation(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    (package / "model").mkdir(parents=True)
    (package / "model" / "a.py").write_text("1")
    listed = [identity.listing(package)]
    assert identity.listing(package) == listed[0]
    (package / "model" / "__pycache__").mkdir()
    (package / "model" / "__pycache__" / "a.pyc").write_text("")
    assert identity.listing(package) == listed[0], "what importing leaves does not count"
    (package / "model" / "a.py").write_text("22")
    listed.append(identity.listing(package))
    os.utime(package / "model" / "a.py", ns=(1, 1))
    listed.append(identity.listing(package))
    (package / "b.so").write_text("")
    listed.append(identity.listing(package))
    assert len(set(listed)) == 4


def test_the_key_of_a_run_covers_the_installed_vllm(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation without metadata that is changed in place, as an editable one is."""
    for name in ("vllm", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = config({"engine": {"seed": 1}}, {})

    def found() -> str:
        sides = {side: sources.look(asked, side, tmp_path) for side in ("parent", "candidate")}
        assert sides["parent"].opening.source.vllm_location == str(tmp_path / "vllm")
        return sources.key(asked, sides)

    first = found()
    assert found() == first
    (tmp_path / "other" / "__init__.py").write_text("1")
    assert found() == first
    (tmp_path / "vllm" / "__init__.py").write_text("# changed")
    assert found() != first


def told(native: str, gpus: Sequence[str] = ()) -> dict[str, Any]:
    """What a capture says of that which really ran."""
    python = {"files": 1, "digest": "0" * 32, "changed": []}
    machines = [{"name": name, "uuid": "", "driver": "1"} for name in gpus]
    return {"native": {"torch/a.so": native * 32}, "python": python, "gpus": machines}


def test_what_really_ran_stays_the_same(tmp_path: Path) -> None:
    """Runs without taps know no GPU; those with taps are held to each other's."""
    stories = [told("1"), told("1", ["H200"]), told("1"), told("1", ["H200"])]
    captures = [
        Capture(write(tmp_path, Plan(number=number, manifested={"identity": story})))
        for number, story in enumerate([*stories, told("1", ["A100"]), told("2", ["H200"])], 1)
    ]
    opening = captures[0].open
    side = sources.Side(opening, identity.listing(Path(opening.source.vllm_location)))
    held: dict[str, Any] = {}
    for capture in captures[:4]:
        sources.check_unchanged(side, "parent", held, capture)
    for capture in captures[4:]:
        with pytest.raises(LocalizerError, match="or the machine, is not in"):
            sources.check_unchanged(side, "parent", held, capture)
    changed = sources.Side(opening, "another")
    with pytest.raises(LocalizerError, match="start again with --fresh"):
        sources.check_unchanged(changed, "parent", {}, captures[0])
