"""A git revision as a source: read from git's objects, laid over, and nothing written into the repository."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from repositories import commit, git, state

from localizer.errors import LocalizerError
from localizer.sources import revision as module
from localizer.sources.revision import find, lay, place

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages" / "vllm"
    folder.mkdir(parents=True)
    (folder / "core.py").write_text("core\n")
    (folder / "other.py").write_text("other\n")
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits, `main~1` with core.py as one, `main` as two, and changes that were not committed."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-qb", "main")
    commit(folder, {"vllm/core.py": "one\n", "vllm/other.py": "other\n", "csrc/a.cu": "1"})
    commit(folder, {"vllm/core.py": "two\n", ".gitattributes": "* text eol=crlf\nvllm/x.py export-ignore\n"})
    (folder / "vllm" / "core.py").write_text("edited\n")
    return folder


def laid(text: str, installed: Path) -> Path:
    """The tree from which a revision runs, held no longer."""
    tree = lay(find(text), installed)
    tree.overlay.lock.close()
    return tree.overlay.tree


def test_revisions_share_one_tree_and_leave_the_repository_alone(repository: Path, installed: Path) -> None:
    before = state(repository)
    first = laid(f"{repository}@main~1", installed)
    assert (first / "vllm" / "core.py").read_text() == "one\n"
    second = laid(f"{repository}@main", installed)
    assert second == first
    assert (second / "vllm" / "core.py").read_bytes() == b"two\n"  # as committed: no line ending is changed
    assert (second / "vllm" / "other.py").is_symlink()
    assert state(repository) == before
    assert "vllm/core.py" in before[1]


def test_the_last_at_sign_behind_a_folder_splits(repository: Path, tmp_path: Path, installed: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    git(repository, "branch", "feature/new@2")
    git(repository, "tag", "v1")
    (tmp_path / "odd@main").mkdir()
    git(tmp_path, "clone", "-q", str(repository), "odd@main")
    for text in ("HEAD", "@", "feature/new@2", "v1", "main@{0}", head[:9]):
        found = find(f"{repository}@{text}")
        assert (found.repository, found.text, found.commit) == (repository, text, head)
    assert find(f"{tmp_path}/odd@main@main~1").commit == git(repository, "rev-parse", "main~1")
    assert find(f"{repository}/vllm@main").commit == head


def test_bare_shallow_and_linked_repositories(repository: Path, tmp_path: Path, installed: Path) -> None:
    git(tmp_path, "clone", "-q", "--bare", str(repository), "bare")
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{repository}", "shallow")
    git(repository, "worktree", "add", "-q", str(tmp_path / "linked"), "main~1")
    for name in ("bare", "shallow"):
        assert (laid(f"{tmp_path / name}@main", installed) / "vllm" / "core.py").read_text() == "two\n"
    assert (laid(f"{tmp_path / 'linked'}@HEAD", installed) / "vllm" / "core.py").read_text() == "one\n"
    assert place(tmp_path / "linked") == place(repository)
    assert place(tmp_path / "bare") != place(repository)
    with pytest.raises(LocalizerError, match=r"There is no commit 'main~1' in .*shallow"):
        find(f"{tmp_path / 'shallow'}@main~1")


def test_the_repository_of_a_hook_is_not_asked(
    repository: Path, tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert (laid(f"{repository}@main", installed) / "vllm" / "core.py").read_text() == "two\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{0}", "names no revision; write REPO@REV"),
        ("{0}@", "names no revision"),
        ("{0}/nowhere@main", "There is no folder .*nowhere"),
        ("{1}@main", "is not a git repository .*name the folder of one"),
        ("{0}@nothing", "There is no commit 'nothing' in .*git fetch"),
        ("{0}@--help", "There is no commit '--help' in"),
        ("{0}@main:vllm", "There is no commit 'main:vllm' in"),
    ],
)
def test_what_cannot_be_found_is_said(
    repository: Path, tmp_path: Path, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(LocalizerError, match=rf"{said}.*\.$") as refused:
        find(text.format(repository, tmp_path / "empty"))
    assert "\n" not in str(refused.value)


def test_git_may_be_missing(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LocalizerError, match="git cannot be run"):
        find(f"{repository}@main")


def test_what_cannot_be_laid_over_is_said(repository: Path, installed: Path) -> None:
    commit(repository, {"vllm/core.py": "core\n"})
    with pytest.raises(LocalizerError, match=r"No file of .*@main differs from the vLLM in"):
        laid(f"{repository}@main", installed)
    git(repository, "mv", "vllm", "other")
    commit(repository, {})
    with pytest.raises(LocalizerError, match=r"@main has no vllm/ folder; name a revision of vLLM itself"):
        laid(f"{repository}@main", installed)


@pytest.mark.parametrize("target", ["../../secret", "/etc/passwd", "sub/../../../x"])
def test_links_out_of_the_tree_are_refused(repository: Path, installed: Path, target: str) -> None:
    (repository / "vllm" / "link.py").symlink_to(target)
    commit(repository, {})
    with pytest.raises(LocalizerError, match=r"its link vllm/link.py leads out of vllm/"):
        laid(f"{repository}@main", installed)
    assert not (place(repository) / "vllm").exists()


def test_links_inside_are_followed(repository: Path, installed: Path) -> None:
    (repository / "vllm" / "link.py").symlink_to("core.py")
    commit(repository, {"vllm/core.py": "three\n"})
    assert (laid(f"{repository}@main", installed) / "vllm" / "link.py").read_text() == "three\n"


def tree(repository: Path, *entries: tuple[str, str, str]) -> str:
    """A tree object of entries that git itself would not make: (mode, name, object)."""
    blob = b"".join(f"{mode} {name}".encode() + b"\0" + bytes.fromhex(entry) for mode, name, entry in entries)
    arguments = ("hash-object", "-t", "tree", "-w", "--literally", "--stdin")
    return git(repository, *arguments, given=blob)


def test_nothing_is_written_outside_whatever_the_tree_names(
    repository: Path, installed: Path, tmp_path: Path
) -> None:
    """A tree with a file `../../x`, and one in which a link is a folder as well."""
    file = git(repository, "hash-object", "-w", "--stdin", given=b"evil")
    out = git(repository, "hash-object", "-w", "--stdin", given=os.fsencode(tmp_path))
    below = tree(repository, ("100644", "evil.py", file))
    climbing = tree(repository, ("40000", "..", tree(repository, ("40000", "..", below))))
    both = tree(repository, ("120000", "a", out), ("40000", "a", below))
    for inner in (climbing, both):
        root = tree(repository, ("40000", "vllm", inner))
        made = git(repository, "commit-tree", root, "-m", "evil")
        with pytest.raises(LocalizerError):
            laid(f"{repository}@{made}", installed)
        assert not [path for path in tmp_path.rglob("evil.py") if "cache/git" not in str(path)]
    assert (laid(f"{repository}@main", installed) / "vllm" / "core.py").read_text() == "two\n"


def test_another_revision_waits_for_the_end_of_a_capture(repository: Path, installed: Path) -> None:
    held = lay(find(f"{repository}@main"), installed)
    laid(f"{repository}@HEAD", installed)  # the same commit
    with pytest.raises(LocalizerError, match=r"A capture of another revision of .* is running; wait until"):
        lay(find(f"{repository}@main~1"), installed)
    assert (held.overlay.tree / "vllm" / "core.py").read_text() == "two\n"
    held.overlay.lock.close()
    assert (laid(f"{repository}@main~1", installed) / "vllm" / "core.py").read_text() == "one\n"


def test_a_revision_that_was_cut_off_is_written_again(
    repository: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid(f"{repository}@main~1", installed)

    def cut(revision: object, objects: list[str]) -> list[bytes]:
        return [b"half" for _ in objects]

    with monkeypatch.context() as patched:
        patched.setattr(module, "_contents", cut)
        patched.setattr(
            module.shutil, "rmtree", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "full"))
        )
        with pytest.raises(LocalizerError, match=r"cannot be written to .*full.*LOCALIZER_CACHE"):
            laid(f"{repository}@main", installed)
    assert (laid(f"{repository}@main~1", installed) / "vllm" / "core.py").read_text() == "one\n"


def test_two_at_once_take_turns(repository: Path, installed: Path) -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                assert (laid(f"{repository}@main", installed) / "vllm" / "core.py").read_text() == "two\n"
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
