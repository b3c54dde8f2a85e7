"""Every interleaving of a producer and a consumer of tiny rings: no frame is lost, overwritten, or stuck."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest

from localizer.wire import ring as module
from localizer.wire.ring import ALIGN, CONTROL_BYTES, MESSAGE, Ring, RingError, create

FRAMES = 6


class State(NamedTuple):
    """Both ends between two steps: what they know, the ring, and the frames written and read so far."""

    producer: tuple[int, ...]
    consumer: int
    head: int
    tail: int
    memory: bytes
    written: int = 0
    read: int = 0
    offset: int = 0  # of the body that is reserved, and its length; 0 where none is
    length: int = 0
    taken: bool = False


class Both:
    """The real ends of one ring, put into any state."""

    def __init__(self, units: int) -> None:
        self.most = units // 2
        descriptor = create(units * ALIGN)
        self.producer, self.consumer = Ring(descriptor), Ring(descriptor)
        os.close(descriptor)

    def load(self, state: State) -> None:
        ring = self.producer
        ring._head, ring._room, ring._lap, ring._before, ring._wall = state.producer
        ring._words[module._HEAD], ring._words[module._TAIL] = state.head, state.tail
        ring.buffer[CONTROL_BYTES:] = state.memory
        self.consumer._lap = state.consumer

    def save(self, state: State, **changes: int) -> State:
        ring = self.producer
        known = ring._head, ring._room, ring._lap, ring._before, ring._wall
        words = (int(ring._words[word]) for word in (module._HEAD, module._TAIL))
        memory = bytes(ring.buffer[CONTROL_BYTES:])
        return state._replace(**changes)._replace(
            producer=known,
            consumer=self.consumer._lap,
            memory=memory,
            **dict(zip(("head", "tail"), words, strict=True)),
        )

    def steps(self, state: State) -> list[State]:
        """What may come next."""
        found = [] if state.written == FRAMES else self.produce(state)
        if state.taken or state.head != state.tail:
            found += self.consume(state)
        return found

    def produce(self, state: State) -> list[State]:
        found = []
        if not state.offset:
            for units in range(self.most):
                self.load(state)
                try:
                    offset = self.producer.reserve(units * ALIGN, patience=0)
                except RingError:
                    assert state.head != state.tail, "an empty ring has no room"
                    continue
                assert CONTROL_BYTES < offset <= len(self.producer.buffer) - units * ALIGN
                self.producer.buffer[offset : offset + units * ALIGN] = b"?" * (units * ALIGN)
                found.append(self.save(state, offset=offset, length=units * ALIGN))
            return found
        number = state.written + 1
        for length in {0, state.length}:
            self.load(state)
            self.producer.buffer[state.offset : state.offset + length] = bytes([number]) * length
            self.producer.commit(MESSAGE, length, (number,))
            found.append(self.save(state, written=number, offset=0, length=0))
        return found

    def consume(self, state: State) -> list[State]:
        """Take the next frame, or look at it again and give it back."""
        self.load(state)
        frames = self.consumer.frames(lambda: True)
        frame = next(frames, None)
        if frame is None:  # only a filler, or the end of a lap, was there
            assert not state.taken
            return [self.save(state)]
        assert frame.args[0] == state.read + 1
        assert set(bytes(frame.body)) <= {state.read + 1}
        del frame
        if state.taken:
            next(frames, None)
        frames.close()
        return [self.save(state, read=state.read + state.taken, taken=not state.taken)]


@pytest.mark.parametrize("units", range(2, 6))
@pytest.mark.parametrize("lap", [0, 2])
def test_every_interleaving(units: int, lap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOT_BYTES", lap * ALIGN)
    both = Both(units)
    first = State((0,) * 5, 0, 0, 0, bytes(units * ALIGN))
    todo, seen, ends = [first], {first}, 0
    while todo:
        state = todo.pop()
        following = both.steps(state)
        if not following:
            assert (state.written, state.read) == (FRAMES, FRAMES)
            ends += 1
        for found in following:
            if found not in seen:
                seen.add(found)
                todo.append(found)
    assert ends
