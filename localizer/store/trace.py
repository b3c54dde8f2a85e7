"""The schedule trace: what the engine asked for in each recorded step, beside the rows that came of it.

A shard is `rank-N/steps-NNNNN.jsonl`, one record a line. It closes after some thousand steps, apart from the
sets of the row table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash

from localizer.errors import DamagedCapture
from localizer.store import schema, tensors
from localizer.store.journal import append_journal
from localizer.store.schema import Shard
from localizer.store.steps import StreamError
from localizer.store.types import Count, Few, Integer

SHARD_STEPS = 4096
"""A shard is closed after this many steps ..."""

SHARD_BYTES = 8 << 20
"""... or this many bytes, whichever comes first."""

NAME = re.compile(r"rank-(0|[1-9]\d{0,4})/steps-(\d{5}|[1-9]\d{5,8})\.jsonl", re.ASCII)
"""Names of the shards."""

REQUESTS = ("requests", "resumed", "preempted", "finished")
"""Fields that name requests."""

Plain = Integer | float | bool | str | None
PlainTable = Annotated[dict[str, Plain], Few]
Counts = Annotated[list[Count], Few]
Digests = Annotated[list[str], Few]
DigestTable = Annotated[dict[str, Digests], Few]


class StepTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step as it was scheduled. Requests are indices into the workload order; `scheduled`, `computed`,
    `cached`, `drafts`, `blocks`, `slots` and the lists of `keys` and `values` have one item for each of
    `requests`.

    Attributes:
        step: as in the row table.
        requests: in batch order.
        scheduled: tokens scheduled, so rows; their sum is the number of real rows of the forward.
        computed: tokens computed before the step, as the scheduler had it.
        cached: how many of those came from the prefix cache, told when a request is scheduled for the first
            time or again after preemption, else 0.
        drafts: draft tokens among the scheduled ones.
        resumed: those of `requests` that had been preempted.
        preempted, finished: requests that the scheduler preempted or ended since the step before.
        padded: rows of the forward, batch padding included.
        graph: the graph mode of the forward, such as `NONE`, `PIECEWISE` or `FULL`.
        batch: vLLM's batch descriptor, by which it looks up graphs; empty if there is none.
        backend: numbers, flags and texts of the attention metadata of the first tapped layer.
        blocks: digests of the numbers of the KV blocks that hold the request's tokens up to this step.
        slots: digests of the KV slots that the step writes; None where only the device knows them.
        keys, values: by attention layer, digests of the request's keys and values from position 0 on, after
            the step, gathered through the block table; only with `--kv-contents`.
    """

    step: Count
    requests: Counts
    scheduled: Counts
    computed: Counts
    cached: Counts
    drafts: Counts
    resumed: Counts = []
    preempted: Counts = []
    finished: Counts = []
    padded: Count
    graph: str
    batch: PlainTable
    backend: PlainTable
    blocks: Digests | None = None
    slots: Digests | None = None
    keys: DigestTable = {}
    values: DigestTable = {}

    def __post_init__(self) -> None:
        count = len(self.requests)
        lists: list[Sequence[Any]] = [self.scheduled, self.computed, self.cached, self.drafts]
        lists += [digests for digests in (self.blocks, self.slots) if digests is not None]
        lists += [*self.keys.values(), *self.values.values()]
        if len(set(self.requests)) != count or any(len(items) != count for items in lists):
            raise ValueError("its lists do not have one item for each request")


class TraceWriter:
    """Turns what one worker says of its steps into the shards of a rank.

    Args:
        folder: the capture's folder.
        rank: number of the worker, whose folder exists.
        requests: request ids in the order of the workload.

    Raises (every method):
        OSError: a shard cannot be written.
        StreamError: the worker contradicts itself.
    """

    def __init__(self, folder: Path, rank: int, requests: Sequence[str]) -> None:
        self._folder, self._place = folder, f"rank-{rank}"
        self._workload = {request: number for number, request in enumerate(requests)}
        self._index: dict[str, int] = {}
        self._step: dict[str, Any] | None = None
        self._lines: list[bytes] = []
        self._bytes = self._shards = self._steps = 0

    def round(self, names: Mapping[str, str]) -> None:
        """Start a round: `names` maps vLLM's internal request ids to ours."""
        self._index |= {internal: self._workload[name] for internal, name in names.items()}

    def step(self, content: Mapping[str, Any]) -> None:
        """Take the trace of the next step: the fields of `StepTrace`, requests by internal id."""
        self._finish_step()
        traced = dict(content)
        for field in REQUESTS:
            known = [self._index[request] for request in content[field] if request in self._index]
            traced[field] = known if field == "requests" else sorted(known)
        self._step = traced

    def contents(self, keys: Mapping[str, Sequence[str]], values: Mapping[str, Sequence[str]]) -> None:
        """Take the digests of keys and values after the step."""
        if self._step is not None:
            self._step |= {"keys": keys, "values": values}

    def close(self) -> int:
        """Write what is left; return the number of steps."""
        self._finish_step()
        self._flush()
        return self._steps

    def _finish_step(self) -> None:
        if self._step is None:
            return
        try:
            line = msgspec.json.encode(msgspec.convert(self._step, StepTrace)) + b"\n"
        except (msgspec.ValidationError, OverflowError) as error:
            raise StreamError(f"the trace of a step cannot be used: {error}") from None
        self._step = None
        self._lines.append(line)
        self._bytes += len(line)
        self._steps += 1
        if len(self._lines) >= SHARD_STEPS or self._bytes >= SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write the finished steps as one shard and journal it."""
        if not self._lines:
            return
        name = f"{self._place}/steps-{self._shards:05d}.jsonl"
        blob = b"".join(self._lines)
        tensors.replace(self._folder / name, blob)
        digest = xxhash.xxh3_128_hexdigest(blob)
        append_journal(self._folder, Shard(name=name, size=len(blob), xxh3_128=digest))
        self._lines, self._bytes, self._shards = [], 0, self._shards + 1


def read(path: Path, requests: int) -> list[StepTrace]:
    """The steps of one shard.

    Args:
        path: the shard.
        requests: how many requests the workload has.

    Raises:
        DamagedCapture: a line is not the trace of a step that follows the one before.
    """
    found: list[StepTrace] = []
    lines = schema.read(path).split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            trace = schema.parse(line, StepTrace)
        except ValueError as error:
            raise _damaged(path, number, str(error)) from None
        if any(index >= requests for field in REQUESTS for index in getattr(trace, field)):
            raise _damaged(path, number, "it names a request that the workload does not have")
        if found and trace.step <= found[-1].step:
            raise _damaged(path, number, "its step does not follow the one before")
        found.append(trace)
    if lines[-1]:
        raise _damaged(path, len(lines), "it does not end")
    return found


def _damaged(path: Path, line: int, why: str) -> DamagedCapture:
    return DamagedCapture(f"{path} is damaged in line {line} ({why[:200]}); fetch or make the capture again.")
