"""The row digest of a GPU, by its reference: frozen, and changed by whatever changes a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localizer.wire import rowsum

KNOWN = {
    b"": "33a617e066e7be5c309d81848fcb9dcf",
    b"\0": "90ba3fc361f1b1aa7807d8159f29c6a6",
    b"abc": "90a691cc5f15543f5672e91849fdcee9",
    bytes(8): "991fea0633e23f60394e6a12b5bfdaae",
    bytes(range(16)): "9bd2f5eb4faf32831fb14ee843814982",
    bytes(range(256)) * 33 + b"!": "5071ee2200733ab2b2574223bef86c69",
}
"""Rows, and their digests as they were when the algorithm got its name."""

MASK = (1 << 64) - 1

rows = st.binary(min_size=1, max_size=300)


def of(*several: bytes) -> list[bytes]:
    """The digests of rows of equal length."""
    table = np.frombuffer(b"".join(several), np.uint8).reshape(len(several), -1)
    return [digest.tobytes() for digest in rowsum.digests(table)]


def one(row: bytes) -> bytes:
    return rowsum.digests(np.frombuffer(row, np.uint8).reshape(1, -1))[0].tobytes()


def slowly(row: bytes) -> bytes:
    """As docs/capture-format.md says it, word by word in Python's integers."""

    def mix_a(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    def mix_b(x: int) -> int:
        x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD & MASK
        x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53 & MASK
        return x ^ (x >> 33)

    a, b = 0x243F6A8885A308D3, 0x13198A2E03707344
    for number, start in enumerate(range(0, len(row), 8), 1):
        word = int.from_bytes(row[start : start + 8].ljust(8, b"\0"), "little")
        a += mix_a(word ^ (0x243F6A8885A308D3 + number * 0x9E3779B97F4A7C15 & MASK))
        b += mix_b(word ^ (0x13198A2E03707344 + number * 0xD1B54A32D192ED03 & MASK))
    a, b = mix_a(a + len(row) & MASK), mix_b(b + len(row) & MASK)
    a = a + b & MASK
    b = b + a & MASK
    return a.to_bytes(8, "little") + b.to_bytes(8, "little")


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: f"{len(row)} bytes")
def test_known_answers(row: bytes) -> None:
    assert one(row).hex() == slowly(row).hex() == KNOWN[row]


@given(st.lists(st.integers(0, 255), max_size=200), st.integers(1, 5))
def test_the_reference_is_what_the_format_says(values: list[int], several: int) -> None:
    row = bytes(values)
    table = np.frombuffer(row * several, np.uint8).reshape(several, len(row))
    assert rowsum.digests(table).tobytes() == slowly(row) * several


def test_rows_longer_than_what_is_mixed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.random.default_rng(1).integers(0, 256, (3, 1001), np.uint8)
    whole = rowsum.digests(table)
    monkeypatch.setattr(rowsum, "WORDS_AT_ONCE", 12)
    assert np.array_equal(rowsum.digests(table), whole)
    assert np.array_equal(rowsum.digests(np.zeros((0, 9), np.uint8)), np.zeros((0, 16), np.uint8))


def test_every_bit_counts() -> None:
    row = np.random.default_rng(2).integers(0, 256, 99, np.uint8)
    bits = np.unpackbits(row)
    flipped = np.packbits(np.tile(bits, (len(bits), 1)) ^ np.eye(len(bits), dtype=np.uint8), axis=1)
    found = {digest.tobytes() for digest in rowsum.digests(np.vstack([row, flipped]))}
    assert len(found) == 1 + len(bits)


@given(st.data())
def test_a_changed_word_is_always_seen(data: st.DataObject) -> None:
    """Both lanes are bijections of a word: no change of one alone is ever missed, in either lane."""
    row = data.draw(rows)
    start = 8 * data.draw(st.integers(0, (len(row) - 1) // 8))
    part = row[start : start + 8]
    other = data.draw(st.binary(min_size=len(part), max_size=len(part)).filter(lambda it: it != part))
    before, after = of(row, row[:start] + other + row[start + 8 :])
    assert before != after


@given(st.binary(min_size=16, max_size=256), st.randoms(use_true_random=False))
def test_order_counts(row: bytes, random: object) -> None:
    for size in (1, 2, 4, 8):
        items = [row[start : start + size] for start in range(0, len(row) - len(row) % size, size)]
        shuffled = list(items)
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        ours, theirs = b"".join(items), b"".join(shuffled)
        assert (ours == theirs) == (one(ours) == one(theirs))


@given(rows, st.integers(1, 9))
def test_length_counts(row: bytes, more: int) -> None:
    assert one(row) != one(row + bytes(more))
    assert one(bytes(len(row))) != one(bytes(len(row) + more))


def test_what_differs_in_the_field_differs_here() -> None:
    """Swapped words and heads, changed signs, negated pairs, a shift by one, one value twice: all at once."""
    generator = np.random.default_rng(3)
    seen: dict[bytes, bytes] = {}
    for number in range(60):
        values = generator.standard_normal((4, 16), np.float32).astype(np.float16)
        if number % 3 == 0:
            values[:] = values[0, 0]  # equal words, of which plain sums see nothing but how many there are
        variants = [values, -values, np.roll(values, 1), np.zeros_like(values), values[::-1], values[:, ::-1]]
        for i in range(64):
            for j in range(i + 1, 64, 5):
                flat = values.ravel()
                swapped, negated, moved = flat.copy(), flat.copy(), flat.copy()
                swapped[[i, j]] = flat[[j, i]]
                negated[[i, j]] *= -1
                moved[i], moved[j] = flat[i] + np.float16(1), flat[j] - np.float16(1)
                variants += [swapped, negated, moved]
        blobs = [np.ascontiguousarray(variant).tobytes() for variant in variants]
        for blob, digest in zip(blobs, of(*blobs), strict=True):
            for half in (digest[:8], digest[8:]):  # each half alone tells them apart
                assert seen.setdefault(half, blob) == blob
    assert len(seen) > 2 * 60 * 64


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_words_that_change_places_with_their_keys(seed: int) -> None:
    """Words chosen so that one lane cannot see that they were exchanged: the other sees it."""
    generator = np.random.default_rng(seed)
    words = generator.integers(0, 1 << 63, 8, np.uint64)
    i, j = 2, 5
    keys = [np.uint64((rowsum.SEED_A + (k + 1) * rowsum.STEP_A) & MASK) for k in (i, j)]
    other = words.copy()
    other[i], other[j] = words[j] ^ keys[0] ^ keys[1], words[i] ^ keys[0] ^ keys[1]
    before, after = of(words.tobytes(), other.tobytes())
    assert before != after


def test_avalanche() -> None:
    """Each bit of a row changes about half of the bits of its digest, wherever it lies."""
    generator = np.random.default_rng(4)
    size, tries = 24, 400
    changed = np.zeros((size * 8, 128))
    for _ in range(tries):
        row = generator.integers(0, 256, size, np.uint8)
        bits = np.unpackbits(row)
        flipped = np.packbits(np.tile(bits, (len(bits), 1)) ^ np.eye(len(bits), dtype=np.uint8), axis=1)
        digests = np.unpackbits(rowsum.digests(np.vstack([row, flipped])), axis=1)
        changed += digests[1:] ^ digests[0]
    share = changed / tries
    # a share of 400 fair coins has a deviation of 0.025; the farthest of 24,576 is within 5 of them
    assert 0.375 < share.min()
    assert share.max() < 0.625
    assert abs(share.mean() - 0.5) < 0.002
