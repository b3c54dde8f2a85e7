"""The examples in docs/: remade from their archive they are the same, and the archive says what it said.

The archive is not remade: if one of these tests fails since the format of captures or of results changed, the
archives that people have attached to their pull requests cannot be read any more either.
"""

from __future__ import annotations

import copy
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden
import pytest
from examples import ARCHIVE, CHECKING, FOLDER, MAKING, Done, recorded, run, unlike

SIDES = ("candidate", "parent", "control-1")
KEPT = 1_500_000
"""Bytes that a clone of the repository may cost for the example."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Done]:
    """What the commands of the README say, run in a folder with the archive alone."""
    return run([sys.executable, "-m", "localizer"], folder, None)


def test_the_commands_of_the_readme() -> None:
    assert [words[:2] for words in CHECKING] == [
        ["localize", name] for name in ("verify", "diff", "attach", "report")
    ]
    assert [words[:2] for words in MAKING] == [
        ["localize", name] for name in ("capture", "capture", "capture", "attach")
    ]


def test_the_archive_is_sound_and_complete(done: dict[str, Done]) -> None:
    assert (done["verify"].returncode, done["verify"].stderr) == (0, "")
    assert done["verify"].stdout.count("sound and complete") == len(SIDES)


def test_the_diff_says_what_it_said_where_the_archive_was_made(done: dict[str, Done]) -> None:
    assert [done[name].returncode for name in ("diff", "json")] == [1, 1]
    found, told = json.loads(done["json"].stdout), recorded()
    assert (told["verdict"], told["attribution"]) == ("diverged", "candidate-only")
    assert list(unlike(told, found)) == []
    assert done["diff"].stdout.startswith(f"diverged: first at {told['first']['site']}, request ")


def test_another_number_would_be_seen() -> None:
    told = recorded()
    other: Any = copy.deepcopy(told)
    other["sites"][7]["rows_differ"] += 1
    del other["first"]["max_ulp"]
    other["scope"] = other["new"] = None
    assert sorted(unlike(told, other)) == [".first.max_ulp", ".sites[7].rows_differ"]


@pytest.mark.parametrize(("name", "command"), [("smollm2.md", "attach"), ("smollm2.html", "report")])
def test_comment_and_page_are_made_of_the_archive(
    done: dict[str, Done], folder: Path, name: str, command: str
) -> None:
    assert (done[command].returncode, done[command].stderr) == (0, "")
    made = (folder / "docs" / "examples" / name).read_bytes().decode()
    golden.check(name, made, FOLDER)


def test_the_captures_were_made_as_the_comment_says() -> None:
    """The README leaves out what is as it is by default."""
    comment = (FOLDER / "smollm2.md").read_text().splitlines()
    for words in MAKING[:3]:
        line = next(line for line in comment if line.startswith(" ".join([*words[:3], ""])))
        assert set(words) <= set(line.split())


def strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield key
            yield from strings(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from strings(value)
    elif isinstance(tree, str):
        yield tree


def test_nothing_private_is_in_the_archive() -> None:
    assert ARCHIVE.stat().st_size < KEPT
    with zipfile.ZipFile(ARCHIVE) as archive:
        names = [name for name in archive.namelist() if name.endswith(".json")]
        documents = {name: json.loads(archive.read(name)) for name in names}
        logs = {archive.read(f"{side}/log.txt").decode().strip() for side in SIDES}
    assert len(documents) == 1 + 2 * len(SIDES)
    said = [text for document in documents.values() for text in strings(document)]
    assert [text for text in said if text.startswith(("/", "~"))] == []
    assert logs == {"The log was left out by localize attach --redact."}
    for side in SIDES:
        opened = documents[f"{side}/open.json"]
        assert opened["host"].keys() == {"system", "processor"}
        assert all(prompt.keys() == {"prefixes"} for prompt in opened["workload"]["prompts"])
