"""Signatures are told where every witness shows them and no equal row does, and not otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Change, Plan, Where, attention, bump, drafted, pair, toy_token

from localizer.diff import diff
from localizer.diff.result import Result, Signature
from localizer.diff.signature import SIGNATURES
from localizer.report.patterns import sentence
from localizer.store.reader import Capture
from localizer.wire.spec import HIDDEN

PROMPTS = ((1, 2, 3, 4, 5), (4, 5, 6, 7, 8), (7, 8, 9, 10, 11), (3, 1, 4, 1, 5))
PLAN = Plan(prompts=PROMPTS, matrix=(1, 4), max_tokens=3)
SITE = attention(1, "output")
Compared = Callable[..., Result]


@pytest.fixture
def compared(tmp_path: Path) -> Compared:
    numbers = count()

    def work(changes: Mapping[Where, Change], plan: Plan = PLAN, **candidate: Any) -> Result:
        one, other = pair(tmp_path / str(next(numbers)), plan, changes=changes, **candidate)
        return diff(Capture(one), Capture(other))

    return work


def codes(result: Result) -> list[str]:
    return [pattern.code for pattern in result.signatures]


def at(positions: Mapping[str, int], site: str = SITE) -> dict[Where, Change]:
    return {(request, position, site): bump() for request, position in positions.items()}


def test_no_difference_has_no_signature(compared: Compared) -> None:
    assert compared({}).signatures == []


def test_one_row_shows_too_much_to_be_a_pattern(compared: Compared) -> None:
    assert codes(compared(at({"r01.02": 4}))) == []


def test_the_last_token(compared: Compared) -> None:
    result = compared(at(dict.fromkeys(PLAN.requests, 4)))
    found = next(pattern for pattern in result.signatures if pattern.code == "last-token")
    assert (found.rows, found.equal_rows) == (5, 20)
    assert "last-token" not in codes(compared(at(dict.fromkeys(PLAN.requests, 3))))


def test_equal_rows_of_the_same_kind_speak_against_a_pattern(compared: Compared) -> None:
    result = compared(at({"r01.01": 4, "r01.02": 4}))  # r00.00 has an equal last row
    assert "last-token" not in codes(result)
    assert "decode-only" not in codes(result)


def test_decode_rows_alone(compared: Compared) -> None:
    result = compared(at(dict.fromkeys(PLAN.requests, 5)))
    found = {pattern.code: pattern for pattern in result.signatures}
    assert set(found) == {"decode-only"}
    assert (found["decode-only"].rows, found["decode-only"].equal_rows) == (5, 25)


def test_prompt_rows_alone(compared: Compared) -> None:
    requests = ("r00.00", "r01.00", "r01.01", "r01.02")
    changed = at(dict.fromkeys(requests, 0))
    assert "prefill-only" not in codes(compared(changed))  # prompt rows of r01.03 are equal


def test_from_position_one_on(compared: Compared) -> None:
    assert "from-position-1" in codes(compared(at(dict.fromkeys(PLAN.requests, 1))))
    few = at({request: 1 for request in PLAN.requests if request != "r01.03"})
    assert "from-position-1" not in codes(compared(few))


def test_batches_over_a_size(compared: Compared) -> None:
    result = compared(at({f"r01.0{index}": 0 for index in range(4)}))
    found = next(pattern for pattern in result.signatures if pattern.code == "batch-size-over")
    assert (found.number, found.rows) == (1, 4)
    assert "equal" in sentence(found)
    assert "batch-size-over" not in codes(compared(at({f"r01.0{index}": 2 for index in range(4)})))


def test_behind_a_chunk_boundary(compared: Compared) -> None:
    plan = Plan(prompts=PROMPTS, matrix=(1, 4), max_tokens=3, chunk=2)
    assert "after-chunk-boundary" in codes(compared(at(dict.fromkeys(PLAN.requests, 2)), plan))
    assert "after-chunk-boundary" not in codes(compared(at(dict.fromkeys(PLAN.requests, 1)), plan))


def test_the_draft_alone(compared: Compared) -> None:
    plan = Plan(speculate=2, max_tokens=6)
    site = drafted(attention(3, "output"), 1)
    assert codes(compared({("r01.01", 4, site): bump()}, plan))[0] == "draft-only"


def test_the_sampler_alone(compared: Compared) -> None:
    token = toy_token(PROMPTS[1])
    result = compared({}, outputs={"r01.01": [token, 15, 15]})
    assert codes(result)[0] == "sampler-only"


@pytest.mark.parametrize(("heads", "expected"), [((0,), [0]), ((0, 1), None)])
def test_the_same_few_heads(compared: Compared, heads: tuple[int, ...], expected: list[int] | None) -> None:
    def change(row: np.ndarray) -> np.ndarray:
        for head in range(len(row)) if expected is None else heads:
            row = bump((head, 1))(row)
        return row

    query = attention(1, "query")
    result = compared({(request, 3, query): change for request in PLAN.requests})
    found = [pattern for pattern in result.signatures if pattern.code == "heads"]
    assert [pattern.heads for pattern in found] == ([] if expected is None else [expected])


def scaled(factor: float) -> Change:
    def change(row: np.ndarray) -> np.ndarray:
        return (row.astype(np.float32) * (1 + factor)).astype(row.dtype)

    return change


@pytest.mark.parametrize(
    ("factors", "code", "number"),
    [
        ((0.01, 0.1, 0.5), "grows", None),
        ((0.5, 0.1, 0.02), "decays", None),
        ((0.1, 0.1, 0.1), None, None),
        ((0.1, 0.1, None), "decays", 0),
    ],
)
def test_the_course_over_the_layers(
    compared: Compared, factors: tuple[float | None, ...], code: str | None, number: int | None
) -> None:
    changes = {
        ("r01.01", 3, attention(layer, "output")): scaled(factor)
        for layer, factor in enumerate(factors)
        if factor is not None
    }
    plan = Plan(prompts=PROMPTS, matrix=(1, 4), max_tokens=3, dtype="float32")
    found = compared(changes, plan).signatures
    assert [pattern.code for pattern in found] == ([] if code is None else [code])
    if code is not None and number is not None:
        assert found[0].number == number
    elif code is not None:
        assert (found[0].number or 0) >= 4


def test_outputs_with_heads_have_a_course_too(compared: Compared) -> None:
    """As vLLM's attention gives them: [heads, head_dim]."""
    layouts = {attention(layer, "output"): ("float32", (2, 4)) for layer in range(3)}
    factors = (0.01, 0.1, 0.5)
    changes = {
        ("r01.01", 3, attention(layer, "output")): scaled(factor) for layer, factor in enumerate(factors)
    }
    plan = Plan(prompts=PROMPTS, matrix=(1, 4), max_tokens=3, dtype="float32", layouts=layouts)
    assert [pattern.code for pattern in compared(changes, plan).signatures] == ["grows"]


def test_without_payload_no_course_is_told(compared: Compared) -> None:
    changes = {("r01.01", 3, attention(layer, "output")): scaled(10.0**layer) for layer in range(3)}
    assert codes(compared(changes, payload=frozenset())) == []


def test_the_histogram_counts_requests_by_their_first_place(compared: Compared) -> None:
    changes = at({"r00.00": 3, "r01.00": 3, "r01.02": 5}) | at({"r01.00": 6}) | at({"r01.01": 2}, HIDDEN)
    result = compared(changes)
    found = [(bar.site, bar.layer, bar.position, bar.requests) for bar in result.histogram]
    assert found == [(SITE, 1, 3, 2), (SITE, 1, 5, 1)]
    assert sum(bar.requests for bar in result.histogram) == len(result.requests)


@pytest.mark.parametrize("code", SIGNATURES)
def test_every_signature_has_a_sentence_of_its_own(code: str) -> None:
    pattern = Signature(code=code, rows=3, equal_rows=8, number=4, heads=[1, 2])
    text = sentence(pattern)
    assert code not in ("from-position-1",) or "position 1" in text
    assert text != code
    assert not text.endswith(".")
