"""The likely cause of a failure is read from the log, the error report and the exit status."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from localizer.capture.diagnose import is_refusal, last_lines, likely_cause


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.txt"
    path.write_text("")
    return path


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("RuntimeError: operator torchvision::nms does not exist", "torchvision does not fit torch"),
        (
            "TypeError: EngineArgs.__init__() got an unexpected keyword argument 'enforce_eagr'",
            "vLLM has no engine argument 'enforce_eagr'; check --engine",
        ),
        ("ModuleNotFoundError: No module named 'triton'", "the source lacks 'triton'"),
        ("ImportError: cannot import name 'LLM' from 'vllm'", "the source lacks 'LLM'"),
        (
            "ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, max_model_len (9) is greater [type=value_error, input={}]",
            "vLLM refused an engine argument: Value error, max_model_len (9) is greater; check --engine",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", "there is not enough memory"),
        ("ValueError: Available memory on node 0 (3 GiB) is less than wanted", "there is not enough memory"),
        ("huggingface_hub.errors.LocalEntryNotFoundError: x", "the model could not be fetched"),
        ("CppCompileError: C++ compile error\nfatal error: Python.h: No such file", "no C++ compiler works"),
        ("UnknownLayout: vLLM 9.9: LLM has no enqueue", "vLLM 9.9: LLM has no enqueue; capture a version"),
        ("localizer.hooks.layout.CannotTap: it is not; do this", "it is not; do this"),
        (
            "ValueError: LLM.enqueue() is only supported for generative models.",
            "pooling models return no tokens",
        ),
        (
            "AssertionError: Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers.",
            "vLLM gives each worker on the CPU a NUMA node of its own, and there are fewer; name the cores",
        ),
        ("Stopped: so it is\nand more", "Stopped: so it is"),
        ("Stopped: ", "Stopped:"),
    ],
)
def test_causes_in_the_error_report(log: Path, text: str, cause: str) -> None:
    kind, _, message = text.partition(": ")
    assert likely_cause(log, {"type": kind, "message": message}, 1).startswith(cause)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("(EngineCore pid=1) ERROR 01-01 [core.py:1] TypeError: it was so", "TypeError: it was so"),
        (
            "(Worker pid=1) ERROR 01-01 [x.py:1] localizer.hooks.layout.UnknownLayout: vLLM 9.9: X has no y\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "vLLM 9.9: X has no y; capture a version",
        ),
        (
            "ValueError: the first to fail\nRuntimeError: Engine core failed. See root cause above.",
            "ValueError: the first to fail",
        ),
        ("WARNING: there was an ImportError: but all went on", "its log does not say"),
        ("", "its log does not say"),
    ],
)
def test_causes_in_the_log(log: Path, text: str, cause: str) -> None:
    """They count where the report only says that another process failed first, or where there is none."""
    log.write_text(f"INFO starting\n{text}\nINFO ending\n")
    assert likely_cause(log, None, 1).startswith(cause)
    report = {"type": "RuntimeError", "message": "Engine core initialization failed. See root cause above."}
    if "does not say" not in cause:
        assert likely_cause(log, report, 1).startswith(cause)


def test_a_signal(log: Path) -> None:
    assert likely_cause(log, None, -9) == "it was ended by signal 9"


def test_a_full_disk_is_seen_without_a_log(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 0))
    assert likely_cause(log, None, 1).startswith("the disk is full")


def test_the_last_lines_are_clean(log: Path) -> None:
    log.write_bytes(b"first\n\x1b[31mred\x1b[0m\n\n  \nbell\x07 \xff\rover\n" + b"x" * 5 + b"\n")
    assert last_lines(log) == ["first", "red", "bell �", "over", "xxxxx"]
    assert last_lines(log, 1) == ["xxxxx"]


def test_only_the_end_of_a_long_log_is_read(log: Path) -> None:
    log.write_text("RuntimeError: long ago\n" + "line\n" * 100_000)
    assert last_lines(log, 2) == ["line", "line"]
    assert likely_cause(log, None, 1) == "its log does not say"


@pytest.mark.parametrize(
    ("kind", "refused"),
    [("localizer.hooks.layout.CannotTap", True), ("UnknownLayout", True), ("ValueError", False)],
)
def test_what_localizer_itself_refuses_needs_no_log(tmp_path: Path, kind: str, refused: bool) -> None:
    log = tmp_path / "log.txt"
    log.write_text("")
    assert is_refusal(log, {"type": kind, "message": "it is not; do this"}) is refused
    log.write_text(f"Traceback\n{kind}: it is not; do this\n")
    assert is_refusal(log, None) is refused
