"""What is said of a capture beside its diff: a version that was not tested is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import Plan, write

from localizer.report.captures import details, made, untested
from localizer.store.reader import Capture
from localizer.wire.versions import SEEN, is_seen, seen_on

ADAPTER = {"runner": "v1", "platform": "cpu", "seen": False}
VERSIONS = {"vllm": "0.99.0"}
SENTENCE = "vLLM 0.99.0 with the V1 model runner on cpu; localizer was seen to work there on " + ", ".join(
    SEEN["v1", "cpu"]
)


def capture(root: Path, running: dict[str, Any]) -> Capture:
    return Capture(write(root, Plan(running=running)))


def test_an_untested_version_is_named(tmp_path: Path) -> None:
    taken = capture(tmp_path, {"adapter": ADAPTER, "versions": VERSIONS})
    assert untested(taken) == [SENTENCE]
    assert f"  untested version: {SENTENCE}" in made(taken)
    assert f"  untested      {SENTENCE}" in details(taken)


@pytest.mark.parametrize("running", [{}, {"adapter": ADAPTER | {"seen": True}}, {"adapter": "odd"}])
def test_other_captures_say_nothing(tmp_path: Path, running: dict[str, Any]) -> None:
    taken = capture(tmp_path, running)
    assert untested(taken) == []
    assert "untested" not in made(taken) + details(taken)


def test_a_stranger_s_words_stay_in_line(tmp_path: Path) -> None:
    hostile = {"runner": "v\x1b[1m", "platform": ["x\n"], "seen": False}
    (sentence,) = untested(capture(tmp_path, {"adapter": hostile, "versions": 3}))
    assert sentence.isprintable()
    assert sentence.endswith("localizer was seen to work there on no version")


def test_what_was_chosen_is_shown(tmp_path: Path) -> None:
    taken = capture(tmp_path, {})
    assert "\n                rows " not in details(taken)
    chosen = msgspec.structs.replace(taken.open.observer, sites=("*/query",), rows=("r00.00", "last"))
    taken.open = msgspec.structs.replace(taken.open, observer=chosen)
    assert "\n                sites */query\n                rows r00.00, last\n" in details(taken)


def test_versions_by_platform_and_runner() -> None:
    assert seen_on("cpu") == seen_on("cpu", "v1") == SEEN["v1", "cpu"]
    assert seen_on("cpu", "v2") == seen_on("tpu") == ()
    assert is_seen("0.32.0+cpu", "cpu")
    assert not is_seen("0.32.0", "tpu")
    assert not is_seen("0.32.0rc1", "cpu")
    assert not is_seen("", "cpu")
