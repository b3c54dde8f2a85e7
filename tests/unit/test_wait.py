"""Files that a shared file system shows late are waited for, but not without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import Plan, write

from localizer.errors import LocalizerError
from localizer.store import schema, wait
from localizer.store.reader import Capture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, Plan())


def later(action: Callable[[], object]) -> threading.Thread:
    """Do something after a while, as another machine would."""
    thread = threading.Timer(0.3, action)
    thread.start()
    return thread


def late(path: Path, parts: int = 1) -> threading.Thread:
    """Take a file away and bring it back after a while, in parts."""
    content = path.read_bytes()
    path.unlink()

    def bring() -> None:
        for part in range(1, parts + 1):
            path.write_bytes(content[: len(content) * part // parts])
            time.sleep(0.1)

    return later(bring)


def test_what_is_there_is_not_waited_for(folder: Path) -> None:
    started = time.monotonic()
    wait.for_manifest(folder)
    wait.for_shards(folder, (folder / schema.JOURNAL).stat().st_size)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", [schema.MANIFEST, schema.JOURNAL, "rank-0/rows-00000.safetensors"])
def test_a_late_file_is_waited_for(folder: Path, name: str, parts: int) -> None:
    whole = (folder / name).stat().st_size
    if name == schema.MANIFEST:
        parts = 1  # it is renamed when it is whole
    journal = (folder / schema.JOURNAL).stat().st_size
    thread = late(folder / name, parts)
    wait.for_shards(folder, journal) if name == schema.JOURNAL else wait.for_manifest(folder)
    assert (folder / name).stat().st_size == whole
    thread.join()
    assert Capture(folder).complete


@pytest.mark.parametrize("name", [schema.MANIFEST, "rank-0/digests-00000.safetensors"])
def test_the_wait_ends(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wait.VARIABLE, "0.2")
    (folder / name).unlink()
    started = time.monotonic()
    with pytest.raises(
        LocalizerError, match=rf"lacks {name} after 0.2 seconds; .*{wait.VARIABLE}=SECONDS"
    ) as said:
        wait.for_manifest(folder)
    assert 0.2 <= time.monotonic() - started < 5
    assert "\n" not in str(said.value)


def test_damage_is_left_to_readers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that are no JSON, and names that no file can have, do not end in a traceback."""
    monkeypatch.setenv(wait.VARIABLE, "0")
    with (folder / schema.JOURNAL).open("ab") as journal:
        journal.write(b"not JSON\n")
    wait.for_manifest(folder)
    with (folder / schema.JOURNAL).open("ab") as journal:
        journal.write(b'{"name": "a\\u0000b", "size": 1, "xxh3_128": ""}\n')
    with pytest.raises(LocalizerError):
        wait.for_manifest(folder)


@pytest.mark.parametrize(("text", "seconds"), [("", 30.0), ("2.5", 2.5), ("0", 0.0)])
def test_how_long(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv(wait.VARIABLE, text)
    assert wait.patience() == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_wait_that_is_no_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(wait.VARIABLE, text)
    with pytest.raises(LocalizerError, match=f"LOCALIZER_FILE_WAIT='{text}' is no number of seconds"):
        wait.patience()
