"""The ring hands every frame over whole and in order, waits within bounds, and ends in a clear way."""

from __future__ import annotations

import os
import threading
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localizer.wire import ring as rings
from localizer.wire.ring import ALIGN, MESSAGE, ROWS, Frame, Ring, RingError

CAPACITY = 2048


@pytest.fixture
def ends():
    """Producer and consumer of a small ring."""
    fd = rings.create(CAPACITY)
    producer, consumer = Ring(fd), Ring(f"/proc/{os.getpid()}/fd/{fd}")
    os.close(fd)
    yield producer, consumer
    producer.unmap()
    consumer.unmap()


def put(ring: Ring, body: bytes, kind: int = ROWS, args: tuple[int, ...] = (), **how: object) -> None:
    offset = ring.reserve(len(body), **how)
    ring.buffer[offset : offset + len(body)] = body
    ring.commit(kind, len(body), args)


def take(ring: Ring) -> list[tuple[int, tuple[int, ...], bytes]]:
    """All frames that are there now."""
    return [(frame.kind, frame.args, bytes(frame.body)) for frame in ring.frames(lambda: True)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, CAPACITY // 2 - ALIGN), max_size=60),
    st.lists(st.booleans(), min_size=1, max_size=10),
    st.sampled_from([0, 256, 1 << 20]),
)
def test_frames_arrive_whole_and_in_order(sizes: list[int], dawdle: list[bool], hot: int) -> None:
    with mock.patch.object(rings, "HOT_BYTES", hot):
        pass_through(sizes, dawdle)


def pass_through(sizes: list[int], dawdle: list[bool]) -> None:
    """Send frames of these sizes through a small ring to a consumer that sometimes takes its time."""
    fd = rings.create(CAPACITY)
    producer, consumer = Ring(fd), Ring(fd)
    os.close(fd)
    sent = [(index, os.urandom(size)) for index, size in enumerate(sizes)]
    received: list[tuple[int, bytes]] = []

    def consume() -> None:
        for frame in consumer.frames(lambda: False, pause=0.0001, linger=0):
            if dawdle[len(received) % len(dawdle)]:
                threading.Event().wait(0.0005)  # lets the ring fill up
            received.append((frame.args[0], bytes(frame.body)))

    thread = threading.Thread(target=consume)
    thread.start()
    for index, body in sent:
        put(producer, body, args=(index,), patience=30)
    producer.close()
    thread.join()
    assert received == sent
    producer.unmap()
    consumer.unmap()


@given(st.integers(1, 1000))
def test_capacity_is_rounded_up(capacity: int) -> None:
    fd = rings.create(capacity)
    ring = Ring(fd)
    os.close(fd)
    assert capacity <= ring.capacity < capacity + ALIGN
    assert ring.capacity % ALIGN == 0
    ring.unmap()


def test_bodies_are_aligned(ends: tuple[Ring, Ring]) -> None:
    producer, consumer = ends
    for size in (1, 63, 64, 65, 0, 200):
        assert producer.reserve(size) % ALIGN == 0
        producer.commit(ROWS, size)
    assert [len(body) for _, _, body in take(consumer)] == [1, 63, 64, 65, 0, 200]


def test_arguments_and_kinds_arrive(ends: tuple[Ring, Ring]) -> None:
    producer, consumer = ends
    put(producer, b"{}", MESSAGE)
    put(producer, b"abc", ROWS, (1, 2, 1 << 63))
    assert take(consumer) == [(MESSAGE, (0,) * 6, b"{}"), (ROWS, (1, 2, 1 << 63, 0, 0, 0), b"abc")]


def test_what_is_not_committed_is_not_seen(ends: tuple[Ring, Ring]) -> None:
    producer, consumer = ends
    producer.reserve(10)
    assert take(consumer) == []
    put(producer, b"second")
    assert [body for _, _, body in take(consumer)] == [b"second"]


def test_a_frame_may_be_shorter_than_its_room(ends: tuple[Ring, Ring]) -> None:
    """What was reserved and not used is used by the next frame, at the end of the ring too."""
    producer, consumer = ends
    sent = [bytes([size]) * size for size in (0, 1, 64, 65, 200, 100, 90, 64, 10, 200, 200, 200, 7)]
    for body in sent:
        offset = producer.reserve(900)
        producer.buffer[offset : offset + len(body)] = body
        producer.commit(ROWS, len(body))
        assert [found for _, _, found in take(consumer)] == [body]
    producer.reserve(10)
    with pytest.raises(ValueError, match="room for 10"):
        producer.commit(ROWS, 11)


def test_a_frame_is_taken_only_after_it_was_used(ends: tuple[Ring, Ring]) -> None:
    producer, consumer = ends
    put(producer, b"first")
    frames = consumer.frames(lambda: True)
    frame: Frame = next(frames)
    frames.close()
    with pytest.raises(ValueError, match="released"):
        bytes(frame.body)
    assert [body for _, _, body in take(consumer)] == [b"first"]


def test_a_frame_larger_than_half_the_ring_is_refused(ends: tuple[Ring, Ring]) -> None:
    with pytest.raises(RingError, match="does not fit"):
        ends[0].reserve(CAPACITY // 2)


def fill(producer: Ring) -> None:
    for _ in range(CAPACITY // 128):
        put(producer, b"x" * 64)


def test_waiting_ends_when_the_consumer_is_gone(ends: tuple[Ring, Ring]) -> None:
    fill(ends[0])
    with pytest.raises(RingError, match="gone"):
        put(ends[0], b"more", alive=lambda: False)


def test_waiting_ends_when_the_consumer_is_stuck(ends: tuple[Ring, Ring]) -> None:
    fill(ends[0])
    with pytest.raises(RingError, match="taken nothing"):
        put(ends[0], b"more", patience=0.01)


def test_a_failed_consumer_ends_waiting_and_every_later_frame(ends: tuple[Ring, Ring]) -> None:
    producer, consumer = ends
    fill(producer)

    def fail() -> bool:
        consumer.fail()
        return True

    with pytest.raises(RingError, match="failed"):
        put(producer, b"more", alive=fail)
    take(consumer)
    with pytest.raises(RingError, match="failed"):
        put(producer, b"later")


def test_frames_committed_before_the_source_ended_are_not_lost(ends: tuple[Ring, Ring]) -> None:
    producer, consumer = ends
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:
            put(producer, b"last words")  # between the look at the ring and the end of the source
        return True

    assert [bytes(frame.body) for frame in consumer.frames(stop)] == [b"last words"]


def test_memory_that_the_consumer_has_left_is_used_again(
    ends: tuple[Ring, Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it never catches up: it is two frames behind whenever room for one is taken."""
    monkeypatch.setattr(rings, "HOT_BYTES", 3 * ALIGN)
    producer, consumer = ends
    frames, sent, received, offsets = consumer.frames(lambda: False), 0, [], []
    for number in range(60):
        offsets.append(producer.reserve(ALIGN, patience=0) - rings.CONTROL_BYTES - ALIGN)
        producer.buffer[producer.reserve(ALIGN)] = sent = number
        producer.commit(ROWS, ALIGN)
        if number > 1:
            received.append(next(frames).body[0])
    frames.close()
    assert received == list(range(58))
    assert sent == 59
    assert max(offsets) <= 8 * ALIGN


def test_to_start_again_takes_no_room(ends: tuple[Ring, Ring], monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer sleeps: what it has already taken must not be waited for."""
    monkeypatch.setattr(rings, "HOT_BYTES", 3 * ALIGN)
    producer, consumer = ends
    for number in range(20):
        sent = [bytes([number, size]) * size * ALIGN for size in (2, 3, 4)]
        for body in sent:
            put(producer, body, patience=0)
        assert [body for _, _, body in take(consumer)] == sent


def test_what_the_consumer_has_not_taken_is_passed_over(
    ends: tuple[Ring, Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It falls asleep in a lap: all but what it has not taken is used before it is waited for."""
    monkeypatch.setattr(rings, "HOT_BYTES", 3 * ALIGN)
    producer, consumer = ends
    frames = consumer.frames(lambda: True)
    sent = [bytes([number]) * ALIGN for number in range(5)]
    for body in sent:
        put(producer, body)
    received = [bytes(next(frames).body) for _ in range(4)]  # the fourth is still being used
    while len(sent) - len(received) < CAPACITY // (2 * ALIGN) - 3:
        sent.append(bytes([len(sent)]) * ALIGN)
        put(producer, sent[-1], patience=0)
    assert received + [bytes(frame.body) for frame in frames] == sent


def test_a_little_is_left_to_become_more(ends: tuple[Ring, Ring]) -> None:
    producer, consumer = ends
    looks: list[int] = []

    def stop() -> bool:
        looks.append(len(looks))
        if len(looks) in (2, 4):
            put(producer, bytes(10))  # two of these are an eighth of the ring
        assert len(looks) < 1000
        return len(looks) > 8

    received = []
    for frame in consumer.frames(stop, pause=0, linger=60):
        received.append((len(looks), len(frame.body)))
    assert received == [(4, 10), (4, 10)]


@pytest.mark.parametrize("before", range(0, CAPACITY, ALIGN))
def test_a_large_frame_finds_room_in_an_empty_ring(
    ends: tuple[Ring, Ring], monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Wherever the last one ended: to start again may not ask for more than the ring has."""
    monkeypatch.setattr(rings, "HOT_BYTES", 3 * ALIGN)
    producer, consumer = ends
    for _ in range(before // (2 * ALIGN)):
        put(producer, b"x" * ALIGN)
    take(consumer)
    large = b"y" * (CAPACITY // 2 - ALIGN)
    put(producer, large, patience=0)
    assert [body for _, _, body in take(consumer)] == [large]


def test_progress_is_seen_by_onlookers(ends: tuple[Ring, Ring]) -> None:
    producer, onlooker = ends
    assert (onlooker.attached, onlooker.progress) == (False, (0, 0, 0))
    producer.attach()
    producer.count(steps=1, rows=5)
    producer.count(steps=1, rows=3, dummy=7)
    assert (onlooker.attached, onlooker.progress) == (True, (2, 8, 7))


def test_something_else_is_not_taken_for_a_ring(tmp_path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(8192))
    with pytest.raises(RingError, match="not a localizer ring"):
        Ring(str(other))


def test_warming_maps_the_ring_and_changes_nothing(ends) -> None:
    producer, consumer = ends
    offset = producer.reserve(4)
    producer.buffer[offset : offset + 4] = b"rows"
    producer.warm()
    consumer.warm()
    producer.commit(MESSAGE, 4)
    producer.close()
    assert [bytes(frame.body) for frame in consumer.frames(lambda: False)] == [b"rows"]
