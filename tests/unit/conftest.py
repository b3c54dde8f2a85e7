"""Fixtures that several unit tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import Made, any_result

from localizer.diff.result import Result
from localizer.run.config import Config, load


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of localizer's cache."""
    monkeypatch.setenv("LOCALIZER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Both sources the installed vLLM, the candidate with a changed file."""
    changed = tmp_path / "overlay" / "vllm" / "extra.py"
    changed.parent.mkdir(parents=True)
    changed.write_text("")
    text = (
        '[workload]\nmodel = "tiny"\n[candidate]\noverlay = "overlay"\n[engine]\nenforce_eager = true\n'
        "kv_cache_memory_bytes = 268435456\n"
    )
    (tmp_path / "localize.toml").write_text(text)
    return load(tmp_path / "localize.toml")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    """Makes the result of a case, always under the relative path `captures`."""

    def make(name: str) -> Result:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        return any_result(name, Path("captures"))

    return make
