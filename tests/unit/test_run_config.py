"""localize.toml: what it may hold, and how a mistake in it is told."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localizer.errors import LocalizerError
from localizer.run.config import TEMPLATE, Config, load
from localizer.run.lines import line_of

DOCS = (Path(__file__).parents[2] / "docs" / "run.md").read_text()
TWO = '[workload]\nmodel = "tiny"\n[candidate]\noverlay = "o"\n'


def read(folder: Path, text: str, *overrides: tuple[str, Any]) -> Config:
    (folder / "localize.toml").write_text(text)
    return load(folder / "localize.toml", overrides)


def test_the_template_says_the_defaults(tmp_path: Path) -> None:
    """What is commented out, switched on, changes nothing."""
    plain = read(tmp_path, TEMPLATE)
    engine = ("enforce_eager", "kv_cache_memory_bytes")
    lines = [
        line.removeprefix("# ")
        if re.match(r"# [a-z_]+ = ", line) and not line[2:].startswith(engine)
        else line
        for line in TEMPLATE.splitlines()
    ]
    assert read(tmp_path, "\n".join(lines)) == plain
    assert plain == read(tmp_path, '[workload]\nmodel="tiny"\n[candidate]\noverlay="overlay"\n')


def keys(kind: Any) -> Iterator[str]:
    for item in msgspec.structs.fields(kind):
        yield item.encode_name
        if isinstance(item.type, type) and issubclass(item.type, msgspec.Struct):
            yield from keys(item.type)


def test_every_key_is_in_the_template_and_in_the_docs() -> None:
    for key in keys(Config):
        assert re.search(rf"^(# )?\[?{key}\b", TEMPLATE, re.MULTILINE), key
        assert re.search(rf"`\[?{key}\]?`", DOCS), key


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (TWO + "[run]\n# so many\ncontrols = 'a'\n", 7, "run.controls: expected `int`, got `str`"),
        (TWO + "[run]\ncontrols = -1\n", 6, "run.controls: expected `int` >= 0"),
        ('[workload]\nmodel = "x"\nmodell = 3\n', 3, "unknown key workload.modell"),
        ("[workload]\nrepeats = 1\n", 1, "the key workload.model is missing"),
        ('[workload]\nmodel = "x"\nmatrix = [\n 1,\n "b",\n]\n', 3, "workload.matrix: expected `int`"),
        ('[workload]\nmodel = "x"\nmatrix = []\n', 3, "workload.matrix: expected `array` of length >= 1"),
        (TWO + '[selection]\nlevel = "all"\n', 6, "selection.level: invalid enum value 'all'"),
        ('x = 1\n[workload]\nmodel = "x"\n', 1, "unknown key x"),
        ("workload = 3\n", 1, "workload: expected `object`, got `int`"),
        ('[workload]\nmodel = "x"\n\n[candidate]\nenvironment = { A = 1 }\n', 5, "candidate.environment"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    with pytest.raises(LocalizerError) as error:
        read(tmp_path, text)
    assert f"localize.toml, line {line}: {words}" in str(error.value)


def test_what_is_no_toml_and_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LocalizerError, match=r"is not TOML that can be used: .*line 1"):
        read(tmp_path, "[workload\n")
    with pytest.raises(LocalizerError, match="write one with localize init"):
        load(tmp_path / "other.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(LocalizerError, match="not UTF-8"):
        load(tmp_path / "binary.toml")


def test_options_stand_in_for_keys(tmp_path: Path) -> None:
    found = read(tmp_path, TWO, ("workload.max_tokens", 3), ("engine.enforce_eager", True))
    assert (found.workload.max_tokens, found.engine) == (3, {"enforce_eager": True})
    with pytest.raises(LocalizerError, match=r"option for run\.controls cannot be used: expected `int`"):
        read(tmp_path, TWO, ("run.controls", "many"))
    with pytest.raises(LocalizerError, match=r"unknown key run\.kontrols"):
        read(tmp_path, TWO, ("run.kontrols", 1))


@given(
    st.dictionaries(
        st.sampled_from("abcde"),
        st.integers() | st.lists(st.integers(), max_size=3) | st.text("xy", max_size=3),
    ),
    st.lists(st.sampled_from(["", "# a", "  # b = 1"]), max_size=3),
)
def test_lines_are_those_of_the_keys(table: dict[str, Any], between: list[str]) -> None:
    lines = ["[t]", *between]
    where = {}
    for key, value in table.items():
        where[key] = len(lines) + 1
        lines += f"{key} = {value!r}".replace("[", "[\n ").split("\n")
        lines += between
    text = "\n".join(lines)
    assert set(tomllib.loads(text)["t"]) == set(table)
    assert {key: line_of(text, ["t", key]) for key in table} == where
    assert line_of(text, ["t", "nothing"]) is None
