"""Fixtures that several unit tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of localizer's cache."""
    monkeypatch.setenv("LOCALIZER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
