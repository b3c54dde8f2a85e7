"""Whether the probed code ran is said plainly."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import Plan, write

from localizer.capture.facts import counts, probes
from localizer.report.captures import details, made
from localizer.report.probes import probed
from localizer.store.reader import Capture
from localizer.store.schema import Probe


def probe(calls: int, hits: int | None, outside: int, cache: str = "") -> Probe:
    return Probe(target="a:C.m", calls=calls, hits=hits, calls_outside_steps=outside, cache=cache)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (probe(664, 660, 0, "kept"), "a:C.m: 664 calls in recorded steps, 660 hits of kept"),
        (
            probe(1, None, 2, "kept"),
            "a:C.m: 1 call in recorded steps, hits not known of kept (2 calls outside of steps)",
        ),
        (probe(1234, None, 0), "a:C.m: 1,234 calls in recorded steps"),
        (probe(0, None, 0), "a:C.m was never called in a recorded step: it did not run there"),
        (
            probe(0, 0, 1, "c"),
            "a:C.m was never called in a recorded step (1 call outside of steps): it did not run there",
        ),
    ],
)  # fmt: skip
def test_sentences(found: Probe, said: str) -> None:
    assert probed(found) == said


def test_a_capture_tells_them_and_stays_complete(tmp_path: Path) -> None:
    taken = Capture(write(tmp_path, Plan(manifested={"probes": [probe(0, None, 3)]})))
    assert taken.complete
    sentence = "a:C.m was never called in a recorded step (3 calls outside of steps): it did not run there"
    assert f"\n  probe {sentence}" in made(taken)
    assert f"\n  probe         {sentence}" in details(taken)


def test_workers_are_added_up() -> None:
    one = {"target": "a:f", "cache": "c", "calls": 2, "hits": 1, "calls_outside_steps": 3}
    two = {"target": "a:g", "calls": 1, "hits": None, "calls_outside_steps": 0}
    workers = [{"probes": [one, two], "counts": {"x": 1}}, {"probes": [one, two], "counts": {"x": 2, "y": 3}}]
    assert probes(workers) == [
        Probe(target="a:f", cache="c", calls=4, hits=2, calls_outside_steps=6),
        Probe(target="a:g", calls=2, hits=None, calls_outside_steps=0),
    ]
    assert counts(workers) == {"x": 3, "y": 3}
    assert probes([one | {"probes": [one]}, {"probes": [one | {"hits": None}]}])[0].hits is None
    assert (probes([]), counts([{}])) == ([], {})
