"""Native code that is not rebuilt is named: by what it differs from where that is known."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from builders import Plan, pair, write
from repositories import commit, git

from localizer.diff import diff
from localizer.report.captures import details, history, made
from localizer.report.native import native_code
from localizer.report.scope import scope
from localizer.sources.native import is_native, of_overlay, of_revision
from localizer.store import schema
from localizer.store.reader import Capture
from localizer.store.schema import Native, Overlay, Revision


@pytest.mark.parametrize(
    "name",
    ["csrc/a.txt", "csrc/b/c.py", "vllm/x.cu", "x.cuh", "a/b.cpp", "b.h", "CMakeLists.txt", "cmake/u.py",
     "csrc/CMakeLists.txt", "setup.py"],
)  # fmt: skip
def test_native(name: str) -> None:
    assert is_native(name)


@pytest.mark.parametrize(
    "name", ["vllm/a.py", "vllm/setup.py", "docs/csrc/a.md", "a.cpp.md", "pyproject.toml"]
)
def test_not_native(name: str) -> None:
    assert not is_native(name)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages" / "vllm"
    folder.mkdir(parents=True)
    (folder / "_version.py").write_text("__commit_id__ = commit_id = None\n")
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose first commit is what is installed; since then csrc/a.cu and Python were changed."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-qb", "main")
    commit(folder, {"vllm/a.py": "1", "csrc/a.cu": "1", "csrc/b.cu": "1", "setup.py": "1"})
    commit(folder, {"vllm/a.py": "2", "csrc/a.cu": "2"})
    return folder


def test_a_folder_with_changed_files(tmp_path: Path, installed: Path) -> None:
    for name in ("vllm/a.py", "csrc/a.cu", ".git/x.h", "build/y.h", "setup.py"):
        path = tmp_path / "overlay" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    found = of_overlay(tmp_path / "overlay", installed, "1.0")
    assert found == Native(against="folder", files=["csrc/a.cu", "setup.py"], count=2)
    assert native_code(found) == "native code is not rebuilt: csrc/a.cu, setup.py have no effect"
    (tmp_path / "python" / "vllm").mkdir(parents=True)
    (tmp_path / "python" / "vllm" / "a.py").write_text("")
    assert of_overlay(tmp_path / "python", installed, "1.0") is None


def test_a_checkout_against_the_installed_version(checkout: Path, installed: Path) -> None:
    """Committed, uncommitted and new files count; what was always there does not."""
    git(checkout, "tag", "v1.0", "main~1")
    index = checkout / ".git" / "index"
    (checkout / "csrc" / "new.h").write_text("")
    for tracked in git(checkout, "ls-files").split():  # as they were, but for their times
        os.utime(checkout / tracked, (1, 1))
    before = index.stat().st_mtime_ns, index.read_bytes()
    found = of_overlay(checkout, installed, "1.0+cpu")
    assert found == Native(against="installed", base="v1.0", files=["csrc/a.cu", "csrc/new.h"], count=2)
    assert (index.stat().st_mtime_ns, index.read_bytes()) == before
    assert of_revision(checkout, git(checkout, "rev-parse", "main"), installed, "1.0") == Native(
        against="installed", base="v1.0", files=["csrc/a.cu"], count=1
    )
    assert of_revision(checkout, git(checkout, "rev-parse", "main~1"), installed, "1.0") is None


def test_a_change_in_the_moment_of_the_commit(checkout: Path, installed: Path) -> None:
    """Of a file that is as old as the index git looks at the bytes: so it must of the copy of the index."""
    git(checkout, "config", "core.trustctime", "false")  # the test cannot set that time
    path, index = checkout / "csrc" / "a.cu", checkout / ".git" / "index"
    before = path.stat()
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    for touched in (path, index):
        os.utime(touched, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = of_overlay(checkout, installed, "1.0")
    assert found is not None
    assert found.files == ["csrc/a.cu"]


def test_the_commit_that_was_installed_goes_before_its_tag(checkout: Path, installed: Path) -> None:
    git(checkout, "tag", "v1.0", "main~1")
    head = git(checkout, "rev-parse", "main")
    (installed / "_version.py").write_text(f"__commit_id__ = commit_id = 'g{head[:10]}'\n")
    assert of_overlay(checkout, installed, "1.0") is None
    (installed / "_version.py").write_text("__commit_id__ = commit_id = 'g0123456789'\n")
    found = of_overlay(checkout, installed, "1.0")
    assert found is not None
    assert found.base == "v1.0"


def test_without_the_installed_commit_only_uncommitted_changes_are_known(
    checkout: Path, installed: Path
) -> None:
    found = of_overlay(checkout, installed, "1.0")
    assert found == Native(against="uncommitted", base="v1.0", files=[], count=0)
    assert native_code(found) == (
        "native code is not rebuilt: committed changes are not known, for want of v1.0 in the checkout"
    )
    (checkout / "setup.py").write_text("2")
    found = of_overlay(checkout, installed, "1.0")
    assert found == Native(against="uncommitted", base="v1.0", files=["setup.py"], count=1)
    assert "uncommitted changes of setup.py have no effect; committed" in native_code(found)
    head = git(checkout, "rev-parse", "main")
    unknown = of_revision(checkout, head, installed, "1.0")
    assert unknown == Native(against="unknown", base="v1.0", files=[], count=0)
    assert "for want of v1.0 in the repository" in native_code(unknown)


def test_a_repository_without_native_code_has_nothing_to_say(tmp_path: Path, installed: Path) -> None:
    git(tmp_path, "init", "-qb", "main", "repo")
    head = commit(tmp_path / "repo", {"vllm/a.py": "1"})
    assert of_overlay(tmp_path / "repo", installed, "1.0") is None
    assert of_revision(tmp_path / "repo", head, installed, "1.0") is None


def test_many_files_are_counted(tmp_path: Path, installed: Path) -> None:
    (tmp_path / "csrc").mkdir()
    for number in range(30):
        (tmp_path / "csrc" / f"{number:02}.cu").write_text("")
    found = of_overlay(tmp_path, installed, "1.0")
    assert found is not None
    assert (len(found.files), found.count) == (20, 30)
    assert "csrc/00.cu, csrc/01.cu, csrc/02.cu and 27 more files have no effect" in native_code(found)


NATIVE = Native(against="installed", base="v1.0", files=["csrc/a.cu"], count=1)
SOURCE = Revision(repository="/src/vllm", revision="feature~1", commit="0123456789abcdef" * 2)


def with_overlay(folder: Path, overlay: Overlay) -> Capture:
    """The capture as if its source had been laid over so."""
    document = folder / schema.OPEN
    opening = schema.decode(document, schema.Open)
    source = msgspec.structs.replace(opening.source, overlay=overlay)
    manifest = schema.decode(folder / schema.MANIFEST, schema.Manifest)
    document.write_bytes(schema.encode(msgspec.structs.replace(opening, source=source)))
    files = [
        schema.Shard(name=file.name, size=document.stat().st_size, xxh3_128=schema_digest(document))
        if file.name == schema.OPEN
        else file
        for file in manifest.files
    ]
    (folder / schema.MANIFEST).write_bytes(schema.encode(msgspec.structs.replace(manifest, files=files)))
    return Capture(folder)


def schema_digest(path: Path) -> str:
    from localizer.store.tensors import file_digest

    return file_digest(path)


def test_what_is_said_of_a_capture(tmp_path: Path) -> None:
    overlay = Overlay(path="/cache/git/1", files={"core.py": "d"}, git=SOURCE, native=NATIVE)
    taken = with_overlay(write(tmp_path, Plan()), overlay)
    sentence = "native code is not rebuilt: csrc/a.cu differs from v1.0 and has no effect"
    assert sentence in details(taken)
    assert f"git           /src/vllm@feature~1, commit {SOURCE.commit}" in details(taken)
    assert f"\n  {sentence}" in made(taken)
    assert "0.32.0 + 1 changed (0123456789ab)" in history(tmp_path)


def test_what_a_comparison_does_not_establish(tmp_path: Path) -> None:
    candidate, parent = pair(tmp_path, Plan())
    ours = with_overlay(candidate, Overlay(path="/c", files={}, git=SOURCE, native=NATIVE))
    other = msgspec.structs.replace(SOURCE, commit="f" * 40, repository="/elsewhere")
    theirs = with_overlay(parent, Overlay(path="/p", files={}, git=other))
    result = diff(ours, theirs)
    assert result.captures.candidate.native == NATIVE
    said = [line for line in scope(result).does_not_establish if "rebuilt" in line]
    assert said == [
        "What the candidate's changes of native code do: it was not rebuilt; csrc/a.cu differs from v1.0 and "
        "has no effect."
    ]
    found = {item.setting: (item.candidate, item.parent) for item in result.differences}
    assert found == {"git.commit": (SOURCE.commit, other.commit)}
