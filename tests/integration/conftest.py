"""Real vLLM engines, started once and shared: captures are made on demand and kept for the session."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from engines import EAGER, IN_PROCESS, Capturing, Quiet

from localizer.cache import cache_folder
from localizer.capture.request import CaptureRequest
from localizer.capture.session import capture
from localizer.sources.fault import Fault, plant
from localizer.store.reader import Capture

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
"""Each worker of pytest-xdist has folders of its own where two engines would write the same files."""


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the session's captures."""
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="session")
def vllm_cache() -> dict[str, str]:
    """A compile cache that survives the session: compiling costs a minute."""
    folder = Path(os.environ.get("VLLM_CACHE_ROOT", cache_folder() / "vllm"))
    return {"VLLM_CACHE_ROOT": str(folder / WORKER)}


@pytest.fixture(scope="session")
def capturing(root: Path, vllm_cache: dict[str, str]) -> Capturing:
    """Make a capture, of the tiny model unless said, or return the one made earlier under the same name."""
    made: dict[str, Capture] = {}

    def work(name: str, *, environment: dict[str, str] = IN_PROCESS, **options: object) -> Capture:
        if name not in made:
            settings = {"model": "tiny", "engine": EAGER, "matrix": "1,2", "repeats": 1, "max_tokens": 6}
            settings |= options
            request = CaptureRequest(name=name, root=root, environment=vllm_cache | environment, **settings)
            made[name] = Capture(capture(request, Quiet()))
        return made[name]

    return work


@pytest.fixture(scope="session")
def installed() -> Path:
    """The folder of the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def overlay(installed: Path) -> Callable[[Fault], Path]:
    """The overlay with a fault; its path stays the same, or vLLM would compile it anew."""

    def work(fault: Fault) -> Path:
        folder = cache_folder() / "tests" / WORKER / xxhash.xxh3_64_hexdigest(fault.line.encode())
        plant(folder, installed, fault)
        return folder

    return work
