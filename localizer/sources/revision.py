"""A git revision as a source: its `vllm/` tree is read from git's objects and laid over like an overlay.

Nothing is written into the person's repository. One repository has one folder in localizer's cache, for all
of its revisions: a new path would make vLLM compile everything again. Files are written as they are in the
commit: no filter, line ending or attribute of the repository changes them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import xxhash

from localizer.cache import cache_folder
from localizer.errors import LocalizerError
from localizer.sources import git, overlay

PACKAGE = "vllm"

_FILE, _LINK = "100", "120000"
"""What the modes of files begin with, and the mode of links; other entries are no files."""


@dataclass(frozen=True)
class Revision:
    """A commit of a repository.

    Attributes:
        repository: its folder, absolute.
        text: the revision as the person typed it.
        commit: what it names, in full.
    """

    repository: Path
    text: str
    commit: str

    def __str__(self) -> str:
        return f"{self.repository}@{self.text}"


@dataclass(frozen=True)
class Laid:
    """A revision that is laid over the installed package: its folder in the cache, and the overlay's tree."""

    folder: Path
    overlay: overlay.Laid


def find(text: str) -> Revision:
    """The commit that `REPO@REV` names; REV begins behind the last `@` before which a folder's name stands.

    Raises:
        LocalizerError: there is no such folder, repository or revision.
    """
    repository, revision = _split(text)
    try:
        git.ask(repository, "rev-parse", "--git-dir")
    except OSError as error:
        raise LocalizerError(f"git cannot be run ({error.strerror}); install it, or use --overlay.") from None
    except subprocess.SubprocessError as error:
        raise LocalizerError(
            f"{repository} is not a git repository{_why(error)}; name the folder of one in --git REPO@REV."
        ) from None
    commit = git.commit(repository, revision)
    if commit is None:
        raise LocalizerError(
            f"There is no commit {revision!r} in {repository}; name a branch, tag or commit that is there "
            "(git fetch gets one that is not)."
        )
    return Revision(repository, revision, commit)


def lay(revision: Revision, installed: Path, *, unchanged: bool = False) -> Laid:
    """Write the revision's `vllm/` into the repository's folder in the cache, and lay it over.

    Waits while another capture does the same.

    Args:
        revision: what to lay over.
        installed: the folder of the installed `vllm` package.
        unchanged: whether it may differ nowhere from that.

    Raises:
        LocalizerError: the revision has no `vllm/` folder, cannot be read or written, differs nowhere from
            the installed package, or a capture of another revision of the repository is running.
    """
    folder = place(revision.repository)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _holds(folder, revision.commit):
                _write(revision, folder)
            return Laid(folder, overlay.lay(folder, installed, str(revision), unchanged=unchanged))
    except overlay.InUse:
        raise LocalizerError(
            f"A capture of another revision of {revision.repository} is running; wait until it has ended."
        ) from None
    except OSError as error:
        raise LocalizerError(
            f"{revision} cannot be written to {folder} ({error.strerror}); name another folder with "
            "LOCALIZER_CACHE."
        ) from None


def place(repository: Path) -> Path:
    """The folder in the cache that belongs to a repository, to all of its work trees."""
    common = git.answer(repository, "rev-parse", "--git-common-dir") or ""
    key = xxhash.xxh3_64_hexdigest(os.fsencode((repository / common.strip()).resolve()))
    return cache_folder() / "git" / key


def _split(text: str) -> tuple[Path, str]:
    places = [index for index, letter in enumerate(text) if letter == "@" and text[index + 1 :]]
    for index in reversed(places):
        folder = Path(os.path.expanduser(text[:index] or "."))
        if folder.is_dir():
            return folder.resolve(), text[index + 1 :]
    if not places:
        raise LocalizerError(f"--git {text!r} names no revision; write REPO@REV, e.g. ~/vllm@main.")
    raise LocalizerError(
        f"There is no folder {text[: places[-1]]}; name that of a git repository in --git REPO@REV."
    )


def _holds(folder: Path, commit: str) -> bool:
    """Whether the folder holds the files of a commit, completely."""
    try:
        return (folder / "commit").read_text() == commit
    except FileNotFoundError:
        return False


def _write(revision: Revision, folder: Path) -> None:
    """Replace the folder's `vllm/` by that of the revision."""
    entries = _entries(revision)
    contents = _contents(revision, [entry for _, entry, _ in entries])
    (folder / "commit").unlink(missing_ok=True)
    for left in folder.glob("new-*"):  # of one that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="new-") as scratch:
        links = []
        for (mode, _, name), content in zip(entries, contents, strict=True):
            path = Path(scratch) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if mode == _LINK:
                links.append((path, content))
            else:
                path.write_bytes(content)
        for path, target in links:  # last, so that nothing is written through one
            path.symlink_to(os.fsdecode(target))
        for path, _ in links:
            if not path.resolve().is_relative_to(Path(scratch).resolve() / PACKAGE):
                raise LocalizerError(
                    f"{revision} cannot be laid over: its link "
                    f"{path.relative_to(scratch)} leads out of vllm/."
                )
        shutil.rmtree(folder / PACKAGE, ignore_errors=True)
        (Path(scratch) / PACKAGE).rename(folder / PACKAGE)
    (folder / "commit").write_text(revision.commit)


def _entries(revision: Revision) -> list[tuple[str, str, str]]:
    """Mode, object and name of every file and link below `vllm/`."""
    try:
        listed = git.ask(
            revision.repository, "ls-tree", "-r", "-z", "--full-tree", revision.commit, f"{PACKAGE}/"
        )
    except subprocess.SubprocessError as error:
        raise _unreadable(revision, error) from None
    found = []
    for line in listed.split(b"\0")[:-1]:
        facts, _, path = line.partition(b"\t")
        mode, _, entry = facts.decode().split()
        name = os.fsdecode(path)
        if ".." in name.split("/"):
            raise LocalizerError(f"{revision} cannot be laid over: it holds a file named {name!r}.")
        if mode.startswith(_FILE) or mode == _LINK:
            found.append((mode, entry, name))
    if not found:
        raise LocalizerError(f"{revision} has no vllm/ folder; name a revision of vLLM itself.")
    return found


def _contents(revision: Revision, objects: list[str]) -> list[bytes]:
    """The contents of objects; git fetches those that a partial clone lacks, if it can."""
    asked = "".join(f"{entry}\n" for entry in objects).encode()
    try:
        told = git.ask(revision.repository, "cat-file", "--batch", given=asked, patient=True)
    except subprocess.SubprocessError as error:
        raise _unreadable(revision, error) from None
    found, place = [], 0
    for entry in objects:
        end = told.index(b"\n", place)
        size = told[place:end].split()[-1]
        if not size.isdigit():
            raise LocalizerError(
                f"{revision} cannot be read: the repository lacks the object {entry}; git fetch may get it."
            )
        found.append(told[end + 1 : end + 1 + int(size)])
        place = end + 1 + int(size) + 1
    return found


def _unreadable(revision: Revision, error: subprocess.SubprocessError) -> LocalizerError:
    return LocalizerError(f"{revision} cannot be read{_why(error)}; see what git fsck says of it.")


def _why(error: subprocess.SubprocessError) -> str:
    """What git said last, in parentheses."""
    said = getattr(error, "stderr", None) or b""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    return f" ({lines[0].removeprefix('fatal: ')})" if lines else ""
