"""Observing changes nothing: tokens and full logits are bit-equal with and without taps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import COMPILED, EAGER, IN_PROCESS, Capturing

from localizer.diff.pipeline import diff
from localizer.sources.fault import MLP, MODELS, Fault
from localizer.store.reader import Capture
from localizer.store.verify import INCOMPLETE, verify
from localizer.wire.spec import LOGITS

pytestmark = pytest.mark.engine


def untapped(capture: Capture, engine: dict[str, Any], environment: dict[str, str], target: Path) -> Any:
    """Tokens [requests, tokens] and logits [requests, tokens, vocabulary] of a run without localizer."""
    work = capture.open.workload
    order = {
        "model": work.model.path,
        "engine": engine,
        "rounds": [work.prompts[:size] for size in work.matrix * work.repeats],
        "max_tokens": work.max_tokens,
        "target": str(target),
    }
    script = Path(__file__).with_name("untapped.py")
    subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(order).encode(),
        env=os.environ | environment,
        check=True,
        capture_output=True,
    )
    return np.load(target)


def captured_logits(capture: Capture) -> np.ndarray:
    """Logits of all token rows as float32 [requests, tokens, vocabulary], in the order of requests."""
    columns = capture.table.columns
    rows = np.lexsort((columns["position"], columns["request"]))
    rows = rows[columns["logits"][rows] > 0]
    found = np.stack([capture.row_payload(LOGITS, int(row)) for row in rows]).astype(np.float32)
    return found.reshape(len(capture.requests), capture.open.workload.max_tokens, -1)


@pytest.mark.parametrize(
    ("mode", "engine", "environment"),
    [
        ("eager", EAGER, IN_PROCESS),
        ("eager-multiprocess", EAGER, {}),
        ("compiled", COMPILED, IN_PROCESS),
    ],
)
def test_tokens_and_logits_are_those_of_an_untapped_run(
    capturing: Capturing,
    vllm_cache: dict[str, str],
    tmp_path: Path,
    mode: str,
    engine: dict[str, Any],
    environment: dict[str, str],
) -> None:
    tapped = capturing(f"neutral-{mode}", engine=engine, environment=environment, payload="all")
    plain = untapped(tapped, engine, vllm_cache | environment, tmp_path / "plain.npz")
    assert [tapped.outputs[name] for name in tapped.requests] == plain["tokens"].tolist()
    assert captured_logits(tapped).tobytes() == plain["logits"].tobytes()


def test_a_tap_that_fails_changes_no_token(capturing: Capturing, overlay: Callable[[Fault], Path]) -> None:
    """Taps break in the middle of the first forward: the run goes on as if there were none."""
    breaks = (
        'import sys; sink = sys.modules.get("localizer.hooks.sink"); sink and vars(sink).update(ROWS=None)'
    )
    fault = Fault(MODELS / "llama.py", MLP, breaks)
    capture, whole = capturing("broken-tap", overlay=overlay(fault), level="module"), capturing("parent")
    assert capture.outputs == whole.outputs
    assert not capture.complete
    assert capture.reasons[0].startswith("the observer stopped recording: ")
    assert len(capture.table) < len(whole.table)
    assert verify(capture.folder).state == INCOMPLETE
    result = diff(capture, whole)
    assert (result.verdict, result.first) == ("inconclusive", None)
