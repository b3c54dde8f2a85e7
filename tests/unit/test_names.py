"""Captures are numbered, never overwritten, and found by the names that people type."""

from __future__ import annotations

from pathlib import Path

import pytest
from altered import small

from localizer.errors import LocalizerError, NotACapture
from localizer.store.names import find, load, names, new_folder, numbered


def test_every_capture_of_a_name_starts_the_next_number(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    made = [new_folder(root, "parent") for _ in range(3)] + [new_folder(root, "other")]
    assert [(folder.relative_to(root).as_posix(), number) for folder, number in made] == [
        ("parent/0001", 1), ("parent/0002", 2), ("parent/0003", 3), ("other/0001", 1),
    ]  # fmt: skip
    assert all(folder.is_dir() for folder, _ in made)


def test_numbers_go_on_after_the_greatest(tmp_path: Path) -> None:
    for name in ("0007", "10000", "note.txt", "12", "0009-old"):
        (tmp_path / "parent" / name).mkdir(parents=True)
    assert new_folder(tmp_path, "parent")[1] == 10001
    assert [path.name for path in numbered(tmp_path / "parent")] == ["0007", "10000", "10001"]


def test_a_file_where_the_next_number_would_be_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "0001").write_text("mine")
    assert new_folder(tmp_path, "parent")[0].name == "0002"
    assert (tmp_path / "parent" / "0001").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../a", "/a", "-a", ".a", "a b", "a\n", "ä", "0001", "12345", "x" * 101, "a\0"],
)
def test_names_that_cannot_be_typed_back_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LocalizerError, match="cannot name a capture"):
        new_folder(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_root_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalizerError, match=r"cannot be written to .*; name a writable folder with --out"):
        new_folder(tmp_path / "file", "parent")


def test_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (small(tmp_path, number=number) for number in (1, 2))
    assert find(tmp_path, "candidate") == second
    assert find(tmp_path, "candidate/0001") == first
    assert find(tmp_path, str(first)) == first
    assert find(tmp_path / "elsewhere", str(tmp_path / "candidate")) == second
    monkeypatch.chdir(first)
    assert find(Path("captures"), ".").resolve() == first
    assert load(tmp_path, "candidate").label == "candidate/0002"


def test_a_folder_without_open_json_is_passed_over(tmp_path: Path) -> None:
    first = small(tmp_path)
    new_folder(tmp_path, "candidate")
    new_folder(tmp_path, "empty")
    assert find(tmp_path, "candidate") == first
    assert names(tmp_path) == ["candidate"]
    with pytest.raises(NotACapture):
        find(tmp_path, "empty")


@pytest.mark.parametrize("reference", ["nothing", "candidate/0002", "candidate/1", "", "a\0b", "../nothing"])
def test_what_is_not_there_lists_what_is(tmp_path: Path, reference: str) -> None:
    small(tmp_path)
    small(tmp_path, name="parent")
    with pytest.raises(NotACapture, match="there are: candidate, parent"):
        find(tmp_path, reference)


def test_an_empty_root_says_so(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(NotACapture, match="holds no captures yet"):
            find(root, "parent")
        assert names(root) == []
