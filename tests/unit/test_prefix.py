"""A prefix names the computation of a row: equal for equal tokens before it, and for nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from localizer.store.prefix import RequestPrefixes, draft_salt, prefix_digest, prefix_digests

TOKENS = st.lists(st.integers(0, 3), max_size=6)


def rows(tokens: Sequence[int], prompt: int) -> list[bytes]:
    """Prefixes of all rows of a request; the first `prompt` of its `tokens` are its prompt."""
    follower = RequestPrefixes(tokens[:prompt])
    found = [follower.row(position, token) for position, token in enumerate(tokens)]
    assert all(row is not None and row[1] == 0 for row in found)
    return [row[0] for row in found if row is not None]


@given(TOKENS, TOKENS)
def test_prefixes_are_equal_exactly_for_equal_tokens(left: list[int], right: list[int]) -> None:
    for p, a in enumerate(rows(left, len(left))):
        for q, b in enumerate(rows(right, len(right))):
            assert (a == b) == (left[: p + 1] == right[: q + 1])


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8), st.data())
def test_it_does_not_matter_which_part_was_the_prompt(tokens: list[int], data: st.DataObject) -> None:
    prompt = data.draw(st.integers(0, len(tokens)))
    expected = [prefix_digest(tokens[: position + 1]) for position in range(len(tokens))]
    assert rows(tokens, prompt) == expected
    assert prefix_digests(tokens) == b"".join(expected)


@given(TOKENS.filter(bool), st.data())
def test_cached_positions_come_from_the_prompt(tokens: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(tokens) - 1))
    follower = RequestPrefixes(tokens)
    assert follower.row(start, tokens[start]) == (prefix_digest(tokens[: start + 1]), 0)


@given(TOKENS.filter(bool), st.data())
def test_computing_again_is_counted(tokens: list[int], data: st.DataObject) -> None:
    """Preemption: the request starts again at some position, any number of times."""
    follower = RequestPrefixes(tokens)
    seen: dict[bytes, int] = {}
    for start in data.draw(st.lists(st.integers(0, len(tokens) - 1), min_size=1, max_size=4)):
        for position in range(start, len(tokens)):
            expected = prefix_digest(tokens[: position + 1])
            assert follower.row(position, tokens[position]) == (expected, seen.get(expected, 0))
            seen[expected] = seen.get(expected, 0) + 1


def test_a_rejected_draft_is_another_computation() -> None:
    follower = RequestPrefixes([1, 2])
    first = [follower.row(position, token) for position, token in enumerate([1, 2, 7, 8])]  # 7, 8 are drafts
    again = [follower.row(position, token) for position, token in enumerate([5, 8], start=2)]
    assert again == [(prefix_digest([1, 2, 5]), 0), (prefix_digest([1, 2, 5, 8]), 0)]
    assert {row[0] for row in first if row}.isdisjoint(row[0] for row in again if row)
    assert follower.row(2, 7) == (prefix_digest([1, 2, 7]), 1)


def test_a_row_after_unknown_tokens_has_no_prefix() -> None:
    follower = RequestPrefixes([1, 2])
    assert follower.row(3, 4) is None
    assert follower.row(2, -1) is None  # a placeholder of async scheduling
    assert follower.row(2, 3) == (prefix_digest([1, 2, 3]), 0)


def test_whether_a_request_has_started() -> None:
    follower = RequestPrefixes([1])
    assert not follower.started
    follower.row(0, 1)
    assert follower.started


@given(TOKENS, st.binary(min_size=1, max_size=4))
def test_a_salt_separates(tokens: list[int], salt: bytes) -> None:
    assert prefix_digest(tokens, salt) != prefix_digest(tokens)
    follower = RequestPrefixes(tokens, salt)
    assert follower.row(len(tokens), 9) == (prefix_digest([*tokens, 9], salt), 0)


def test_the_definition() -> None:
    """Little-endian unsigned 64-bit token ids, xxh3-128, canonical: what the format's description says."""
    assert prefix_digest([1, 258]) == xxhash.xxh3_128_digest(bytes([1, *[0] * 7, 2, 1, *[0] * 6]))
    assert prefix_digest(np.array([1, 258], np.int32)) == prefix_digest([1, 258])
    assert prefix_digest([]).hex() == "99aa06d3014798d86001c324468d497f"  # xxh3-128 of nothing, as published


def test_draft_rows_tell_requests_apart_by_their_first_token() -> None:
    """The inputs of EAGLE run ahead by one and lack the first token, which their hidden states come from."""
    prefixes = []
    for first in (1, 9):
        request = RequestPrefixes([first, 2, 3])
        for position, token in enumerate([first, 2, 3]):
            request.row(position, token)
        prefixes.append([found and found[0] for found in request.draft_rows(1, 2, 0, 1, [2, 3, 4])])
    assert None not in prefixes[0]
    assert not set(prefixes[0]) & set(prefixes[1])
    assert prefixes[0][2] == prefix_digest([1, 2, 3, 4], draft_salt(1, 2))
