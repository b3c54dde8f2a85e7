"""Rows and returned tokens must account for each other, or the capture is not complete."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from builders import Plan, write

from localizer.store.reader import Capture
from localizer.store.schema import MANIFEST, Manifest, Output, decode, encode
from localizer.store.selfcheck import unaccounted
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


@pytest.mark.parametrize("change", ["tokens", "rows_without_prefix", "prompt_mismatches"])
def test_a_complete_capture_that_contradicts_itself_is_damaged(capture: Capture, change: str) -> None:
    path = capture.folder / MANIFEST
    manifest = decode(path, Manifest)
    if change == "tokens":
        changed = {"outputs": outputs(capture, tokens=[9, 9, 9, 9])}
    else:
        changed = {"counts": manifest.counts | {change: 1}}
    path.write_bytes(encode(msgspec.structs.replace(manifest, **changed)))
    assert verify(capture.folder).state == DAMAGED
