"""Taps inside full graphs: what is captured, what is served after a replay, what is missing and said so.

There is no CUDA here: `Capturing` says when a graph is being captured, and a captured graph is doubled by the
list of copies that it would replay.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from localizer.hooks.guard import Guard  # noqa: E402 - needs torch
from localizer.hooks.ingraph import Graphs, Group  # noqa: E402 - needs torch
from localizer.hooks.layout import CannotTap  # noqa: E402

CPU = torch.device("cpu")


class Taken:
    """Takes what a tap serves."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []

    def __call__(self, *tensors: Any) -> None:
        self.tensors.append([None if tensor is None else tensor.clone() for tensor in tensors])


class Capturing:
    def __init__(self) -> None:
        self.now = False

    def __call__(self) -> bool:
        return self.now


class Setting:
    """Graphs with one tap on query and key of the target, and one on the logits of the draft."""

    def __init__(self, free: int = 1 << 20, wanted: Any = lambda site: True, **limits: int) -> None:
        self.capturing, self.log = Capturing(), []
        self.stacks: dict[tuple[str, ...], list[Any]] = {}
        self.graphs = Graphs(
            CPU, self.capturing, wanted, self.log.append, lambda: free, self.stacked, **limits
        )
        self.draft = Taken()
        self.tap = self.graphs.target.tap(["query", "key"])
        self.logits = self.graphs.draft.tap(["logits"], self.draft)

    def stacked(self, sites: Any, draft: bool) -> Any:
        """What records a stack: it keeps copies."""
        assert not draft
        taken = self.stacks.setdefault(tuple(sites), [])
        return lambda tensors: taken.append(tensors.clone())

    def served(self, site: str) -> list[Any]:
        """What was served of a site of the target, once for each time."""
        return [
            tensors[sites.index(site)]
            for sites, taken in self.stacks.items()
            if site in sites
            for tensors in taken
        ]

    def warm_up(self) -> None:
        self.tap.see(torch.zeros(9, 2, 3), torch.zeros(9, 4, dtype=torch.bfloat16))
        self.logits.see(torch.zeros(2, 7))

    def capture(self, tap: Any, *tensors: Any) -> None:
        self.capturing.now = True
        tap.see(*tensors)
        self.capturing.now = False


def test_what_a_replay_leaves_is_served() -> None:
    setting = Setting()
    setting.warm_up()
    setting.graphs.prepare({"target": [8, 4], "draft": [8]}, most_requests=3)
    query, key = torch.randn(4, 2, 3), torch.randn(4, 4).bfloat16()
    setting.capture(setting.tap, query, key)
    setting.graphs.target.serve(4, 2)
    (served_query,), (served_key,) = setting.served("query"), setting.served("key")
    assert torch.equal(served_query[:4], query)
    assert torch.equal(served_key[:4], key)
    assert served_query.shape == (8, 2, 3)  # the sink takes the real rows
    setting.capture(setting.logits, torch.ones(3, 7))
    setting.graphs.draft.serve(4, 2)
    assert [list(tensor.shape) for tensor in setting.draft.tensors[0]] == [[2, 7]]
    assert setting.graphs.problems == []


def test_bytes_are_stated_and_counted_before_anything_is_captured() -> None:
    setting = Setting()
    setting.warm_up()
    setting.graphs.prepare({"target": [1, 2, 4, 8], "draft": [8]}, most_requests=3)
    target, draft = 8 * (2 * 3 * 4 + 4 * 2), 3 * 7 * 4
    assert setting.log == [
        f"{target} bytes on cpu for taps inside the full graphs of the target, of up to 8 rows "
        "(batches 1, 2, 4, 8)",
        f"{draft} bytes on cpu for taps inside the full graphs of the draft, of up to 8 rows (batches 8)",
    ]
    assert setting.graphs.counts() == {
        "graph_tap_bytes": target + draft, "graph_tap_rows_target": 8, "graph_tap_rows_draft": 8,
    }  # fmt: skip


def test_sites_that_are_not_wanted_take_no_memory() -> None:
    setting = Setting(wanted=lambda site: site == "key")
    setting.warm_up()
    setting.graphs.prepare({"target": [8]}, 8)
    assert setting.graphs.bytes == 8 * 4 * 2
    setting.capture(setting.tap, torch.ones(4, 2, 3), torch.ones(4, 4, dtype=torch.bfloat16))
    setting.graphs.target.serve(4, 1)
    assert (len(setting.served("query")), len(setting.served("key"))) == (0, 1)


def test_what_does_not_fit_is_refused() -> None:
    setting = Setting(free=100)
    setting.warm_up()
    with pytest.raises(CannotTap, match="need 256 bytes on the device, 100 are left there; tap fewer"):
        setting.graphs.prepare({"target": [8]}, 8)
    assert setting.tap.buffers == [None, None]


def test_without_full_graphs_nothing_is_allocated_or_served() -> None:
    setting = Setting()
    setting.warm_up()
    setting.graphs.prepare({"target": []}, 8)
    setting.graphs.target.serve(4, 1)
    assert (setting.log, setting.stacks, setting.graphs.bytes) == ([], {}, 0)


def test_graphs_that_are_captured_for_profiling_hold_no_taps() -> None:
    """vLLM captures some before the KV cache is sized: nothing is allocated or copied then."""
    setting = Setting()
    setting.capture(setting.tap, torch.ones(4, 2, 3), torch.ones(4, 4).bfloat16())
    assert setting.tap.buffers == [None, None]
    setting.warm_up()
    setting.graphs.prepare({"target": [8]}, 8)
    assert setting.tap.buffers[0] is not None


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        (torch.ones(9, 2, 3), "query has no buffer for 9 rows"),
        (torch.ones(4, 2, 5), "query is not what it was before the graphs were captured"),
        (torch.ones(4, 2, 3).double(), "query is not what it was"),
    ],
)
def test_what_is_missing_is_said(query: Any, problem: str) -> None:
    setting = Setting()
    setting.warm_up()
    setting.graphs.prepare({"target": [8]}, 8)
    for _ in range(2):
        setting.capture(setting.tap, query, None)
    (sentence,) = setting.graphs.problems
    assert sentence.startswith("1 taps inside full graphs are missing, first: ")
    assert problem in sentence


@pytest.mark.parametrize("odd", [None, torch.ones(4, 2, 5)], ids=["not reached", "of another shape"])
def test_rows_of_another_graph_are_not_served(odd: Any) -> None:
    """What a graph does not copy is still what an earlier one left: missing, and said so."""
    setting = Setting()
    setting.tap = setting.graphs.target.tap(["query", "value"])
    setting.tap.see(torch.zeros(9, 2, 3), torch.zeros(9, 2, 3))
    setting.graphs.prepare({"target": [4, 8]}, 8)
    setting.capture(setting.tap, torch.ones(8, 2, 3), torch.ones(8, 2, 3))
    setting.capture(setting.tap, odd, torch.full((4, 2, 3), 2.0))
    assert setting.graphs.target.serve(8, 2)
    assert (len(setting.served("query")), len(setting.served("value"))) == (1, 1)
    assert setting.graphs.target.serve(4, 2)
    assert (len(setting.served("query")), len(setting.served("value"))) == (1, 2)
    assert setting.served("value")[1][:4].eq(2).all()
    assert "query is not reached in the full graph of 4 rows" in setting.graphs.target.problems


def test_a_second_preparation_changes_nothing() -> None:
    """Graphs hold the addresses of the buffers."""
    setting = Setting()
    setting.warm_up()
    setting.graphs.prepare({"target": [8]}, 8)
    before = setting.tap.buffers[0]
    setting.graphs.prepare({"target": [16]}, 8)
    assert setting.tap.buffers[0] is before


def test_a_group_without_taps() -> None:
    Group(lambda: False, lambda sites: print).serve(4, 1)


def test_a_graph_that_only_measures_memory_lacks_nothing() -> None:
    """V1 captures some before there are buffers, and throws them away."""
    setting = Setting()
    setting.warm_up()
    setting.capture(setting.tap, torch.zeros(4, 2, 3), torch.zeros(4, 4, dtype=torch.bfloat16))
    assert setting.graphs.problems == []
    setting.graphs.prepare({"target": [4]}, 2)
    setting.capture(setting.tap, torch.ones(4, 2, 3), torch.ones(4, 4, dtype=torch.bfloat16))
    setting.graphs.target.serve(4, 2)
    assert setting.served("query")[0][:4].sum() == 4 * 2 * 3


def test_a_site_that_is_not_wanted_is_not_missing() -> None:
    setting = Setting(wanted=lambda site: site != "key")
    setting.warm_up()
    setting.graphs.prepare({"target": [4]}, 2)
    setting.capture(setting.tap, torch.ones(4, 2, 3), torch.ones(4, 4, dtype=torch.bfloat16))
    assert setting.graphs.problems == []
    setting.graphs.target.serve(4, 2)
    assert (float(setting.served("query")[0].sum()), setting.served("key")) == (24.0, [])


def test_graphs_of_more_rows_than_are_asked_for_are_left_alone() -> None:
    setting = Setting(most_rows=4)
    setting.warm_up()
    setting.graphs.prepare({"target": [2, 4, 8], "draft": [8]}, 8)
    assert setting.graphs.counts() == {
        "graph_tap_bytes": 4 * (24 + 8), "graph_tap_rows_target": 4, "graph_tap_rows_draft": 0,
    }  # fmt: skip
    setting.capture(setting.tap, torch.ones(4, 2, 3), torch.ones(4, 4).bfloat16())
    setting.capture(setting.tap, torch.zeros(8, 2, 3), torch.zeros(8, 4).bfloat16())
    assert setting.graphs.problems == []
    assert setting.graphs.target.serve(4, 2)
    assert not setting.graphs.target.serve(8, 2)
    (query,) = setting.served("query")  # of the greater graph nothing is served, least of all old rows
    assert query.sum() == 24
    assert setting.graphs.problems == [
        "1 taps inside full graphs are missing, first: "
        "a full graph of 8 rows was replayed, only those of up to 4 are tapped"
    ]


def test_more_memory_than_is_allowed_is_refused() -> None:
    setting = Setting(most_bytes=200)
    setting.warm_up()
    with pytest.raises(CannotTap, match="need 256 bytes on the device, 200 are allowed"):
        Guard("ended", setting.log)(lambda: setting.graphs.prepare({"target": [8]}, 8))()
    assert setting.log == []
    Setting(most_bytes=256).graphs.prepare({"target": [8]}, 8)


def test_sites_that_are_alike_are_served_as_one_stack() -> None:
    """In the order of their taps; those of other shapes or dtypes apart."""
    setting = Setting()
    taps = [setting.tap, *(setting.graphs.target.tap([f"{n}/query", f"{n}/key"]) for n in range(2))]
    for tap in taps:
        tap.see(torch.zeros(9, 2, 3), torch.zeros(9, 4, dtype=torch.bfloat16))
    setting.graphs.prepare({"target": [40]}, 8)
    for rows in (3, 40):  # few rows are copied one by one, many as they are
        given = [(torch.randn(rows, 3, 2).transpose(1, 2), torch.randn(rows, 4).bfloat16()) for _ in taps]
        for tap, (query, key) in zip(taps, given, strict=True):
            setting.capture(tap, query, key)
        setting.graphs.target.serve(rows, 2)
        assert list(setting.stacks) == [("query", "0/query", "1/query"), ("key", "0/key", "1/key")]
        queries, keys = (taken[-1] for taken in setting.stacks.values())
        for number, (query, key) in enumerate(given):
            assert torch.equal(queries[number, :rows], query)
            assert torch.equal(keys[number, :rows], key)
