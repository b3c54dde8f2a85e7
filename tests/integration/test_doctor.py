"""The doctor examines the vLLM on which these tests run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine


def test_the_vllm_of_the_tests_is_well() -> None:
    command = [sys.executable, "-m", "localizer", "doctor", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    failed = {name: check["text"] for name, check in found.items() if check["state"] == "failure"}
    assert (done.returncode, failed) == (0, {})
    assert found["version"]["code"] == "seen"
    assert found["layout"]["code"] == "known"
    assert found["transformers"]["code"] == "imported"
