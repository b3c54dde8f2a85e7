"""The recorder records real steps, counts other forwards, and keeps its own faults from vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from localizer.hooks.recorder import Recorder  # noqa: E402 - needs torch
from localizer.wire.spec import HIDDEN, INPUT_IDS, LOGITS, POSITIONS, TOKEN  # noqa: E402

QUERY = "model.layers.0.self_attn.attn/query"
SITES = [INPUT_IDS, POSITIONS, QUERY, HIDDEN, LOGITS, TOKEN]


class Notes:
    """Stands in for the sink and notes what it is given."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.taken: list[tuple[str, list[Any]]] = []
        self.counts: list[dict[str, int]] = []
        self.closed = False
        self.warmed = 0

    def warm(self) -> None:
        self.warmed += 1

    def message(self, **content: Any) -> None:
        self.messages.append(content)

    def rows(self, sites: Any, tensors: Any, count: int) -> None:
        for site, tensor in zip(sites, tensors, strict=True):
            if site is not None and tensor is not None:
                self.taken.append((SITES[site], tensor[:count].tolist()))

    def later(self, tensor: Any, convert: Any = None) -> Any:
        return tensor.tolist() if convert is None else convert(tensor.tolist())

    def flush(self) -> None:
        pass

    def count(self, **counters: int) -> None:
        self.counts.append(counters)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def recorder(notes: Notes) -> Recorder:
    recorder = Recorder(notes)  # type: ignore[arg-type]
    rows = ["all", "all", "all", "logits", "logits", "tokens"]
    recorder.register(list(zip(SITES, rows, strict=True)), {"x/key": "shared"}, {})
    return recorder


def scheduled(drafts: dict[str, list[int]] | None = None, **counts: int) -> SimpleNamespace:
    """A scheduler output: tokens scheduled by request."""
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=drafts or {},
    )


IDS, PLACES = torch.tensor([5, 6, 7, 0, 0]), torch.tensor([0, 1, 0, 0, 0])


def test_sites_are_announced_in_order(notes: Notes, recorder: Recorder) -> None:
    assert notes.messages == [
        {
            "type": "sites",
            "sites": [
                (INPUT_IDS, "all"), (POSITIONS, "all"), (QUERY, "all"),
                (HIDDEN, "logits"), (LOGITS, "logits"), (TOKEN, "tokens"),
            ],
            "not_applicable": {"x/key": "shared"},
            "untapped": {},
        }
    ]  # fmt: skip


def test_a_step(notes: Notes, recorder: Recorder) -> None:
    recorder.round({"a": "r00.00", "b": "r00.01"})
    recorder.schedule(scheduled(a=2, b=1))
    assert (recorder.in_forward, recorder.recording) == (True, False)
    recorder.forward_begins(["a", "b"], IDS, PLACES)
    assert recorder.recording
    recorder.rows(QUERY, torch.arange(5.0))
    recorder.logit_rows(LOGITS, torch.zeros(2, 1))
    recorder.forward_ended()
    assert (recorder.in_forward, recorder.recording) == (False, True)
    recorder.sampled(["a", "b"], [[9], []])
    assert not recorder.recording
    assert notes.messages[1:] == [
        {"type": "round", "names": {"a": "r00.00", "b": "r00.01"}},
        {
            "type": "step", "step": 0, "requests": ["a", "b"], "counts": [2, 1], "logits": [1, 1],
            "tokens": [5, 6, 7], "positions": [0, 1, 0],
        },
        {"type": "end", "sampled": {"a": [9], "b": []}},
    ]  # fmt: skip
    assert notes.taken == [
        (INPUT_IDS, [5, 6, 7]), (POSITIONS, [0, 1, 0]), (QUERY, [0, 1, 2]), (LOGITS, [[0], [0]]),
    ]  # fmt: skip
    assert (notes.counts, recorder.errors, recorder.dummies) == ([{"steps": 1, "rows": 3}], [], 0)


def test_drafts_feed_logits_too(notes: Notes, recorder: Recorder) -> None:
    recorder.schedule(scheduled({"a": [6]}, a=2, b=1))
    recorder.forward_begins(["a", "b"], IDS, PLACES)
    assert notes.messages[-1]["logits"] == [2, 1]


def test_the_order_is_that_of_the_batch(notes: Notes, recorder: Recorder) -> None:
    recorder.schedule(scheduled(a=2, b=1))
    recorder.forward_begins(["b", "a"], IDS, PLACES)
    assert (notes.messages[-1]["requests"], notes.messages[-1]["counts"]) == (["b", "a"], [1, 2])


def test_forwards_outside_a_step_are_counted_and_dropped(notes: Notes, recorder: Recorder) -> None:
    """Profiling, warm-up, graph capture; a step without scheduled tokens; a second forward within a step."""
    recorder.forward_begins([], IDS, PLACES)
    recorder.schedule(scheduled())
    recorder.forward_begins([], IDS, PLACES)
    recorder.sampled(["a"], [[1]])
    assert not recorder.recording
    recorder.schedule(scheduled(a=3))
    recorder.forward_begins(["a"], IDS, PLACES)
    recorder.forward_begins(["a"], IDS, PLACES)
    recorder.forward_ended()
    recorder.forward_begins(["a"], IDS, PLACES)
    assert recorder.dummies == 4
    assert [message["type"] for message in notes.messages] == ["sites", "step"]


def test_a_step_without_tokens_is_followed_by_the_next(notes: Notes, recorder: Recorder) -> None:
    for number in range(2):
        recorder.schedule(scheduled(a=1))
        recorder.forward_begins(["a"], IDS, PLACES)
        assert notes.messages[-1]["step"] == number
        recorder.forward_ended()


def test_rows_of_a_batch_that_is_not_the_schedule_are_refused(recorder: Recorder) -> None:
    recorder.schedule(scheduled(a=2, b=1))
    with pytest.raises(RuntimeError, match="does not hold the scheduled requests"):
        recorder.forward_begins(["a"], IDS, PLACES)


def test_logits_of_another_number_of_rows_are_refused(recorder: Recorder) -> None:
    recorder.schedule(scheduled(a=2, b=1))
    recorder.forward_begins(["a", "b"], IDS, PLACES)
    with pytest.raises(RuntimeError, match="lm_head/logits has 3 rows instead of 2"):
        recorder.logit_rows(LOGITS, torch.zeros(3, 1))


def test_the_first_fault_is_noted_and_ends_the_recording(recorder: Recorder) -> None:
    calls = []

    @recorder.guarded
    def act(value: int) -> None:
        calls.append(value)
        if value == 2:
            raise KeyError("that")

    recorder.schedule(scheduled(a=1))
    recorder.forward_begins(["a"], IDS, PLACES)
    for value in (1, 2, 3):
        act(value)
    assert calls == [1, 2]
    assert recorder.errors == ["the observer stopped recording: KeyError: 'that'"]
    assert not recorder.recording


def test_a_tap_records_its_sites(notes: Notes, recorder: Recorder) -> None:
    """The tensors that there are, at the sites that are registered; its faults stay inside."""
    tap = recorder.tap([QUERY, "x/key", POSITIONS])
    recorder.schedule(scheduled(a=2, b=1))
    recorder.forward_begins(["a", "b"], IDS, PLACES)
    notes.taken.clear()
    tap(torch.arange(5.0), torch.zeros(5), None)
    assert notes.taken == [(QUERY, [0, 1, 2])]
    tap()
    assert "the observer stopped recording: ValueError" in recorder.errors[0]
    tap(torch.arange(5.0), None, None)
    assert notes.taken == [(QUERY, [0, 1, 2])]


def test_the_end(notes: Notes, recorder: Recorder) -> None:
    recorder.finish()
    assert notes.closed


def test_which_sites_are_not_kept() -> None:
    recorder = Recorder(Notes())  # type: ignore[arg-type]
    unkept = recorder.unkept("first")
    recorder.register([(INPUT_IDS, "all"), ("a/query", "all"), ("b/query", "all")], {}, {})
    recorder.add("b/query/late", "all")
    assert [unkept(site) for site in range(4)] == [True, False, True, True]
    assert not any(recorder.unkept("all")(site) for site in range(4))
    assert all(recorder.unkept("none")(site) for site in range(4))
