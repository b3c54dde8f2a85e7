"""Files that are written: nothing that is read is overwritten, nothing strange is replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import Plan, pair
from click.testing import CliRunner

from localizer.cli.main import localize
from localizer.errors import LocalizerError
from localizer.store import output, tensors

Call = Callable[..., Any]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Calls `localize` in a folder whose `captures` hold a candidate and a parent."""
    pair(tmp_path / "captures", Plan())
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(localize, arguments)


@pytest.mark.parametrize("command", ["attach", "report"])
def test_captures_that_are_read_are_not_overwritten(call: Call, tmp_path: Path, command: str) -> None:
    assert call("attach", "candidate", "parent", "-o", "x.zip").exit_code == 0
    (tmp_path / "link.zip").symlink_to("x.zip")
    manifest = "captures/candidate/0001/manifest.json"
    for names, to in (
        (("x.zip:candidate", "x.zip:parent"), "x.zip"),
        (("candidate", "parent", "--control", "x.zip:parent"), "link.zip"),
        (("candidate", "parent"), manifest),
        (("captures/candidate/0001", "parent"), manifest),
    ):
        before = Path(to).read_bytes()
        done = call(command, *names, "-o", to)
        assert isinstance(done.exception, LocalizerError), done.output
        assert "belongs to" in str(done.exception)
        assert Path(to).read_bytes() == before


def test_the_archive_of_that_name_by_default_is_not_overwritten(call: Call) -> None:
    assert call("attach", "candidate", "parent").exit_code == 0
    done = call("attach", "candidate-parent.zip:candidate", "candidate-parent.zip:parent", "--no-redact")
    assert "belongs to" in str(done.exception)


def test_an_archive_replaces_archives_alone(call: Call, tmp_path: Path) -> None:
    for _ in range(2):
        assert call("attach", "candidate", "parent", "-o", "x.zip").exit_code == 0
    (tmp_path / "thesis.odt").write_bytes(b"PK\3\4" + b"mine" * 20)
    done = call("attach", "candidate", "parent", "-o", "thesis.odt")
    assert "no archive of localizer" in str(done.exception)
    assert (tmp_path / "thesis.odt").read_bytes().endswith(b"mine")


def test_a_link_is_followed_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    output.write(tmp_path / "link", b"one")
    assert (tmp_path / "file").read_bytes() == b"one"
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    output.write(tmp_path / "pipe", b"two")
    assert os.read(reader, 9) == b"two"
    os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"old")

    def stopped(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tensors.os, "fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        output.write(tmp_path / "x", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"old")]
