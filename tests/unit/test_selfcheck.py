"""Rows and returned tokens must account for each other, or the capture is not complete."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from builders import Plan, write

from localizer.store.reader import Capture
from localizer.store.schema import MANIFEST, Manifest, Output, decode, encode
from localizer.store.selfcheck import unaccounted, unfinished
from localizer.store.verify import DAMAGED, verify


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    return Capture(write(tmp_path, Plan()))


def outputs(capture: Capture, **changes: object) -> list[Output]:
    """What vLLM returned, the first request's output changed."""
    assert capture.manifest is not None
    first, *others = capture.manifest.outputs
    return [msgspec.structs.replace(first, **changes), *others]


def test_rows_account_for_the_work(capture: Capture) -> None:
    assert unaccounted(capture, outputs(capture)) == []


def test_tokens_that_no_row_decided(capture: Capture) -> None:
    tokens = outputs(capture)[0].tokens
    assert unaccounted(capture, outputs(capture, tokens=[*tokens[:-1], tokens[-1] + 1])) == [
        "the rows of 1 requests decided other tokens than were returned, first those of r00.00"
    ]


def test_positions_that_no_row_computed(capture: Capture) -> None:
    longer = [*outputs(capture)[0].tokens, 1]
    assert unaccounted(capture, outputs(capture, tokens=longer))[0] == (
        "rows of 1 requests are missing, first of r00.00"
    )


def test_cached_positions_need_no_rows(capture: Capture) -> None:
    assert unaccounted(capture, outputs(capture, cached_tokens=2)) == []


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_an_unfinished_request_may_have_rows_of_which_nothing_was_returned(
    capture: Capture, finish: str
) -> None:
    aborted = outputs(capture, tokens=[], finish=finish)
    assert unaccounted(capture, aborted) == []
    assert unfinished(aborted) == [f"1 requests were not finished (finish reason {finish!r}), first r00.00"]
    assert unaccounted(capture, outputs(capture, tokens=[9], finish=finish)) != []
    assert unaccounted(capture, outputs(capture, tokens=outputs(capture)[0].tokens[:1], finish=finish)) == []
    assert unfinished(outputs(capture)) == []


def test_the_tokens_of_a_request_of_which_nothing_was_returned_are_those_its_rows_decided(
    capture: Capture,
) -> None:
    whole = dict(capture.outputs)
    path = capture.folder / MANIFEST
    aborted = outputs(capture, tokens=[], finish="abort")
    changed = msgspec.structs.replace(decode(path, Manifest), state="incomplete", outputs=aborted)
    path.write_bytes(encode(changed))
    assert Capture(capture.folder).outputs == whole


@pytest.mark.parametrize("change", ["finish", "tokens", "rows_without_prefix", "prompt_mismatches"])
def test_a_complete_capture_that_contradicts_itself_is_damaged(capture: Capture, change: str) -> None:
    path = capture.folder / MANIFEST
    manifest = decode(path, Manifest)
    if change == "tokens":
        changed = {"outputs": outputs(capture, tokens=[9, 9, 9, 9])}
    elif change == "finish":
        changed = {"outputs": outputs(capture, finish="abort")}
    else:
        changed = {"counts": manifest.counts | {change: 1}}
    path.write_bytes(encode(msgspec.structs.replace(manifest, **changed)))
    assert verify(capture.folder).state == DAMAGED


@pytest.mark.parametrize(
    "logprobs", [[[(1, -0.5)]], [[(1, -0.5)], [(1, -0.5)]], [[(1, -0.5)], [(2, "-inf")], [(2, 0.0)]]]
)
def test_tokens_without_logprobs_are_told(logprobs: list[list[tuple[int, float]]]) -> None:
    ids = {"request": "r00.00", "internal": "0-a", "external": "0", "finish": "length", "cached_tokens": 0}
    asked = [Output(**ids, tokens=[1, 2], logprobs=logprobs)]
    assert unfinished(asked) == ["1 requests lack logprobs of returned tokens, first r00.00"]
    assert unfinished([Output(**ids, tokens=[1, 2], logprobs=[[(1, 0.0)], [(4, -1.0), (2, -3.0)]])]) == []
