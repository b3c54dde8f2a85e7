"""A request is checked and described before anything starts, and secrets stay where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from localizer.capture import request as module
from localizer.capture.request import CaptureRequest, observer_changes, prepare, recorded_environment
from localizer.sources.interpreter import Interpreter


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter with a vLLM, and a model."""
    monkeypatch.setenv("LOCALIZER_CACHE", str(tmp_path / "cache"))
    vllm = tmp_path / "site" / "vllm"
    vllm.mkdir(parents=True)
    (vllm / "core.py").write_text("core\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 50}')
    found = Interpreter("/usr/bin/python3", "3.11.0", "1.0", vllm, "2.0", {"numpy": "2.1"})
    monkeypatch.setattr(module.interpreter, "probe", lambda python, environment: found)
    return vllm


def request(tmp_path: Path, **changes: object) -> CaptureRequest:
    settings = {"name": "c", "root": tmp_path / "captures", "model": str(tmp_path / "model")} | changes
    return CaptureRequest(**settings)  # type: ignore[arg-type]


def test_what_is_described(tmp_path: Path) -> None:
    prepared = prepare(
        request(
            tmp_path, matrix="1,3", prompt_tokens=5, seed=7, engine={"enforce_eager": True}, payload="all"
        )
    )
    work = prepared.opening.workload
    assert (work.matrix, work.repeats, len(work.prompts)) == ([1, 3], 2, 3)
    assert {len(prompt) for prompt in work.prompts} == {5}
    assert max(max(prompt) for prompt in work.prompts) < 50
    assert (work.engine, work.sampling["max_tokens"]) == ({"enforce_eager": True}, 64)
    assert list(work.model.files) == ["config.json"]
    source = prepared.opening.source
    assert (source.vllm, source.torch, source.packages, source.overlay) == (
        "1.0",
        "2.0",
        {"numpy": "2.1"},
        None,
    )
    assert (prepared.executable, prepared.laid) == ("/usr/bin/python3", None)
    assert not (tmp_path / "captures").exists()


def test_an_overlay_is_laid_and_described(tmp_path: Path) -> None:
    (tmp_path / "checkout" / "vllm").mkdir(parents=True)
    (tmp_path / "checkout" / "vllm" / "core.py").write_text("changed\n")
    prepared = prepare(request(tmp_path, overlay=tmp_path / "checkout"))
    overlay = prepared.opening.source.overlay
    assert overlay is not None
    assert (overlay.path, list(overlay.files)) == (str(tmp_path / "checkout"), ["core.py"])
    assert prepared.laid is not None
    assert (prepared.laid.tree / "vllm" / "core.py").read_text() == "changed\n"


def test_without_taps_nothing_is_kept(tmp_path: Path) -> None:
    prepared = prepare(request(tmp_path, taps=False, engine={"worker_extension_cls": "mine"}))
    assert (prepared.opening.observer.taps, prepared.opening.observer.payload) == (False, "none")
    assert len(observer_changes(request(tmp_path, taps=False))) < len(observer_changes(request(tmp_path)))


def test_the_environment_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    monkeypatch.setenv("ELSEWHERE", "1")
    prepared = prepare(request(tmp_path, environment={"MINE": "2"}))
    given = {"VLLM_NO_USAGE_STATS": "0", "ELSEWHERE": "1", "MINE": "2", "PYTHONUNBUFFERED": "1"}
    assert given.items() <= prepared.environment.items()
    assert "environment: VLLM_NO_USAGE_STATS=1" not in prepared.opening.observer.changes


def test_what_is_recorded_of_it() -> None:
    environment = {
        "VLLM_USE_X": "1", "VLLM_MAX_TOKENS_PER_Y": "8", "CUDA_VISIBLE_DEVICES": "0", "LD_PRELOAD": "a.so",
        "HOME": "/home/me", "HF_TOKEN": "hf_1", "MINE": "2", "SECRET": "no",
    }  # fmt: skip
    assert recorded_environment(environment, {"MINE": "2"}) == {
        "VLLM_USE_X": "1", "VLLM_MAX_TOKENS_PER_Y": "8", "CUDA_VISIBLE_DEVICES": "0", "LD_PRELOAD": "a.so",
        "MINE": "2",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_API_KEY",
        "HF_TOKEN",
        "hf_token",
        "AWS_SECRET_ACCESS_KEY",
        "MY_SECRET",
        "DB_PASSWORD",
        "X_CREDENTIALS",
    ],
)
def test_secrets_are_never_recorded(name: str) -> None:
    """Captures are attached to public comments."""
    assert recorded_environment({name: "hidden"}, {name: "hidden"}) == {name: "(not recorded)"}
