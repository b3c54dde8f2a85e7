"""Git repositories that tests make."""

from __future__ import annotations

import subprocess
from pathlib import Path

ME = ("-c", "user.name=me", "-c", "user.email=me@example.com", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str, given: bytes | None = None) -> str:
    """What git prints."""
    done = subprocess.run(
        ["git", *ME, "-C", str(folder), *arguments], input=given, capture_output=True, check=True
    )
    return done.stdout.decode().strip()


def commit(folder: Path, files: dict[str, str]) -> str:
    """Commit these files, and whatever else was changed; return the commit."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "change")
    return git(folder, "rev-parse", "HEAD")


def state(repository: Path) -> tuple[dict[str, tuple[int, int]], str]:
    """When each file of a repository was written, how long it is, and what git says of it."""
    files = {
        str(path.relative_to(repository)): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in repository.rglob("*")
        if path.is_file()
    }
    return files, git(repository, "--no-optional-locks", "status", "--porcelain")
