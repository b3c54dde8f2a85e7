"""A round as the program runs it, on an LLM that is only played."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from localizer.hooks.facts import resources
from localizer.hooks.program import by_rank, children_resources, run_round
from localizer.wire.spec import RunSpec


@dataclass(frozen=True)
class Completion:
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: list[dict[int, Any]] | None = None


@dataclass(frozen=True)
class Returned:
    request_id: str
    outputs: list[Completion]
    num_cached_tokens: int | None


@dataclass
class PlayedLLM:
    """Returns what it is told, whatever is queued; keeps what was called, in order."""

    returns: list[Returned]
    called: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def sleep(self, level: int, mode: str) -> None:
        self.called.append("sleep")

    def enqueue(self, prompts: list[dict[str, Any]], sampling: Any, use_tqdm: bool) -> list[str]:
        self.called.append("enqueue")
        return [f"{number}-ab{number}" for number in range(len(prompts))]

    def collective_rpc(self, method: str, args: tuple[dict[str, str]]) -> None:
        self.names = args[0]

    def wake_up(self) -> None:
        self.called.append("wake_up")

    def wait_for_completion(self, use_tqdm: bool) -> list[Returned]:
        self.called.append("wait_for_completion")
        return self.returns


def test_outputs_come_in_the_order_of_the_round_and_an_aborted_request_has_none() -> None:
    llm = PlayedLLM(
        [
            Returned("2", [Completion((7, 8), "length")], 16),
            Returned("0", [Completion((5,), "stop")], None),
        ]
    )
    spec = RunSpec("m", {}, {}, [[1, 2], [3], [4]], [])
    outputs, seconds = run_round(llm, spec, ["r00.00", "r00.01", "r00.02"], None)
    assert seconds >= 0
    assert llm.called == ["sleep", "enqueue", "wake_up", "wait_for_completion"]
    assert llm.names == {"0-ab0": "r00.00", "1-ab1": "r00.01", "2-ab2": "r00.02"}
    told = [(output["request"], output["tokens"], output["finish"]) for output in outputs]
    assert told == [("r00.00", [5], "stop"), ("r00.01", [], "abort"), ("r00.02", [7, 8], "length")]
    assert [output["external"] for output in outputs] == ["0", "1", "2"]
    assert [output["cached_tokens"] for output in outputs] == [0, 0, 16]


def test_logprobs_are_sorted_by_rank_and_kept_exactly() -> None:
    def found(logprob: float, rank: int | None) -> SimpleNamespace:
        return SimpleNamespace(logprob=logprob, rank=rank)

    table = {
        7: found(-2.3841855067985307e-07, 3),
        5: found(-0.5, 1),
        9: found(float("-inf"), 4),
        2: found(-1, 2),
    }
    assert by_rank(table) == [(5, -0.5), (2, -1), (7, -2.3841855067985307e-07), (9, "-inf")]
    llm = PlayedLLM([Returned("0", [Completion((5,), "length", [table])], 0)])
    (output,), _ = run_round(llm, RunSpec("m", {}, {}, [[1]], []), ["r00.00"], None)
    assert output["logprobs"] == [by_rank(table)]


def test_the_processes_that_were_started_are_measured() -> None:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(120,), name="EngineCore")
    child.start()
    try:
        found = children_resources(resources)["EngineCore"]
        patience = time.monotonic() + 60
        while found["peak_memory"] <= 1 << 20 and time.monotonic() < patience:  # it has hardly begun
            time.sleep(0.05)
            found = children_resources(resources)["EngineCore"]
        assert found["peak_memory"] > 1 << 20
        assert 0 <= found["seconds"] < 120
        assert children_resources(lambda pid: {"pid": pid})["EngineCore"] == {"pid": child.pid}
    finally:
        child.kill()
        child.join()

    def gone(pid: int) -> dict[str, Any]:
        raise ProcessLookupError

    assert children_resources(gone) == {}
