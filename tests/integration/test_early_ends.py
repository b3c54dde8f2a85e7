"""Requests that end before the others of their round: their rows are their own, and the others go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engines import IN_PROCESS, Capturing

from localizer.diff.pipeline import diff
from localizer.sources.fault import Fault
from localizer.store.reader import Capture
from localizer.store.verify import INCOMPLETE, verify
from localizer.workload import plan

pytestmark = pytest.mark.engine

AFTER = 3
"""Tokens that the request is given before it is aborted."""

ABORT = Fault(
    Path("vllm/v1/engine/llm_engine.py"),
    "        # 1) Get EngineCoreOutput from the EngineCore.\n",
    "self.abort_request([name for name, state in self.output_processor.request_states.items()"
    f' if name[:2] == "2-" and len(state.detokenizer.output_token_ids) >= {AFTER}], internal=True)',
)
"""As a program that gives a request up does it: the second request of the second round, after some tokens."""

ABORTED = "r01.01"
WORK = {"matrix": "1,3,2", "max_tokens": 12}


@pytest.fixture(
    params=[
        pytest.param(IN_PROCESS, id="in-process"),
        pytest.param({}, id="multiprocess", marks=pytest.mark.slow),
    ]
)
def aborted(
    request: pytest.FixtureRequest, capturing: Capturing, overlay: Callable[[Fault], Path]
) -> Capture:
    name = f"aborted-{'here' if request.param else 'apart'}"
    return capturing(name, environment=request.param, overlay=overlay(ABORT), **WORK)


@pytest.fixture
def whole(capturing: Capturing) -> Capture:
    return capturing("not-aborted", **WORK)


def test_an_aborted_request_is_told_and_nothing_is_misattributed(aborted: Capture, whole: Capture) -> None:
    assert aborted.manifest is not None
    finishes = {output.request: output.finish for output in aborted.manifest.outputs}
    assert {name for name, finish in finishes.items() if finish == "abort"} == {ABORTED}
    assert aborted.reasons == [f"1 requests were not finished (finish reason 'abort'), first {ABORTED}"]
    assert verify(aborted.folder).state == INCOMPLETE

    decided = aborted.outputs[ABORTED]
    assert AFTER <= len(decided) < WORK["max_tokens"]
    assert decided == whole.outputs[ABORTED][: len(decided)]

    columns = aborted.table.columns
    mine = columns["request"] == aborted.requests.index(ABORTED)
    prompt = len(aborted.prompts[ABORTED])
    assert columns["position"][mine].tolist() == list(range(prompt + len(decided) - 1))
    others = columns["request"] == aborted.requests.index("r01.00")
    assert columns["step"][others].max() > columns["step"][mine].max()  # the round went on without it


def test_its_rows_pair_with_those_of_a_run_that_finished(aborted: Capture, whole: Capture) -> None:
    result = diff(aborted, whole)
    assert (result.verdict, result.first) == ("inconclusive", None)
    assert [reason.code for reason in result.reasons] == ["incomplete-capture"]
    assert result.tokens.requests_differ == 0
    assert result.tokens.requests_unfinished == 1
    assert result.coverage.rows.paired == len(aborted.table) < len(whole.table)
    assert all(site.rows_compared and not site.rows_differ for site in result.sites)
    mine = whole.table.columns["request"] == whole.requests.index(ABORTED)
    assert len(whole.table) - len(aborted.table) < np.count_nonzero(mine)


def test_a_request_that_stops_early(
    capturing: Capturing, whole: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No option asks for stop tokens yet; the workload's sampling parameters do."""
    stop = whole.outputs[ABORTED][AFTER]
    greedy = plan.greedy
    monkeypatch.setattr(plan, "greedy", lambda *given: greedy(*given) | {"stop_token_ids": [stop]})
    stopped = capturing("stopped", **WORK)
    assert (stopped.complete, stopped.reasons) == (True, [])
    for name, tokens in whole.outputs.items():
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert stopped.outputs[name] == tokens[:end]
    assert {len(tokens) for tokens in stopped.outputs.values()} == {AFTER + 1, WORK["max_tokens"]}
    result = diff(stopped, whole)
    assert result.coverage.rows.paired == len(stopped.table) < len(whole.table)
    assert all(site.rows_compared and not site.rows_differ for site in result.sites)
