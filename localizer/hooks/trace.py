"""The schedule trace: what the engine asks for in each step, as the worker sees it.

Seen on vLLM 0.28.0 and 0.32.0 (V1 model runner). Everything is read from the host's copies, so that no device
is waited for: `SchedulerOutput`, the attention metadata, and the block tables that the V1 runner keeps in
numpy; those of V2 lie on the device and come with the step's rows. Slot mappings are read where they lie in
host memory, as on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from localizer.hooks.guard import Guard
from localizer.hooks.recorder import Recorder
from localizer.hooks.sink import Channel
from localizer.hooks.steps import Forward
from localizer.hooks.tables import DeviceTables

DIGEST_BYTES = 16

_PLAIN = (bool, int, float, str)

AfterStep = Callable[[Sequence[str], Mapping[str, int], DeviceTables | None], None]
"""Called after a traced step with the requests in batch order, how many tokens of each are computed, and the
step's block tables, where the runner does not keep them on the host."""


class Tracer:
    """Tells the writer of each recorded step how it was scheduled.

    A fault in it is noted and ends the trace; the recording of rows and the run go on.
    """

    def __init__(self, recorder: Recorder, sink: Channel, runner: Any, layers: Sequence[str]) -> None:
        self._recorder, self._sink, self.runner = recorder, sink, runner
        self._layers = list(layers)
        self._scheduled: Any = None
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._last = -1
        self._ends: dict[str, int] = {}
        self._tables: DeviceTables | None = None
        self.guarded = Guard("the schedule trace ended", recorder.errors)

    def schedule(self, output: Any) -> None:
        """The scheduler asks for a step, perhaps one without tokens."""
        self._scheduled = output
        self._finished |= set(output.finished_req_ids)
        self._preempted |= set(getattr(output, "preempted_req_ids", None) or ())

    def forward(self, forward: Forward) -> None:
        """The target's forward begins, and the recorder knows; told once for each step that is recorded."""
        recorder, output = self._recorder, self._scheduled
        if not recorder.recording or recorder.step == self._last or output is None:
            return
        self._last = recorder.step
        requests, inputs = list(forward.requests), forward.input_ids
        scheduled = [output.num_scheduled_tokens[request] for request in requests]
        known, resumed = output.scheduled_cached_reqs, output.scheduled_cached_reqs.resumed_req_ids
        computed = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
        new = {fresh.req_id: fresh.num_computed_tokens for fresh in output.scheduled_new_reqs}
        computed |= new
        drafts = output.scheduled_spec_decode_tokens
        before = [computed[request] for request in requests]
        ends = [first + count for first, count in zip(before, scheduled, strict=True)]
        metadata = self._metadata(forward.metadata)
        tables = getattr(getattr(self.runner, "input_batch", None), "block_table", None)
        self._sink.message(
            type="trace",
            step=recorder.step,
            requests=requests,
            scheduled=scheduled,
            computed=before,
            cached=[computed[request] if request in new or request in resumed else 0 for request in requests],
            drafts=[len(drafts.get(request, ())) for request in requests],
            resumed=list(resumed),
            preempted=list(self._preempted),
            finished=list(self._finished),
            padded=0 if inputs is None else inputs.shape[0],
            graph=forward.graph,
            batch={} if forward.batch is None else scalars(forward.batch),
            backend={} if metadata is None else scalars(metadata),
            blocks=block_digests(tables, ends)
            if forward.tables is None
            else device_block_digests(self._sink, forward.tables, ends),
            slots=slot_digests(getattr(metadata, "slot_mapping", None), scheduled),
        )
        self._finished, self._preempted = set(), set()
        self._ends, self._tables = dict(zip(requests, ends, strict=True)), forward.tables

    def ended(self, after: AfterStep | None) -> None:
        """The target's forward is over."""
        ends, self._ends = self._ends, {}
        self._scheduled = None
        if after is not None and ends:
            after(list(ends), ends, self._tables)

    def _metadata(self, metadata: Any) -> Any:
        """The attention metadata of the first tapped layer, of the first micro-batch if there are several."""
        while isinstance(metadata, (list, tuple)):
            metadata = metadata[0] if metadata else None
        if isinstance(metadata, Mapping):
            named = [metadata[layer] for layer in self._layers if layer in metadata]
            return next(iter([*named, *metadata.values()]), None)
        return metadata


def scalars(record: Any, nested: bool = True) -> dict[str, Any]:
    """Numbers, flags and texts among an object's attributes, and of the records in it, as `part.name`."""
    found: dict[str, Any] = {}
    attributes = vars(record) if hasattr(record, "__dict__") else _slots(record)
    for name, value in attributes.items():
        if isinstance(value, _PLAIN):
            found[name] = value
        elif nested and dataclasses.is_dataclass(value):
            found |= {f"{name}.{inner}": plain for inner, plain in scalars(value, nested=False).items()}
    return found


def _slots(record: Any) -> dict[str, Any]:
    """Fields of a record that keeps no table of its attributes, such as a named tuple."""
    names: Iterable[str] = getattr(record, "_fields", ()) or getattr(record, "__slots__", ())
    return {name: getattr(record, name, None) for name in names}


def block_digests(tables: Any, ends: Sequence[int]) -> list[str] | None:
    """A digest of the blocks of each request up to position `ends`, over all KV cache groups.

    Args:
        tables: the runner's block tables, rows in batch order.
        ends: by request, the number of tokens computed when the step is over.
    """
    groups = getattr(tables, "block_tables", None)
    if groups is None:
        return None
    arrays = [(table.get_numpy_array(), table.block_size) for table in groups]
    found = []
    for row, end in enumerate(ends):
        digest = blake2b(digest_size=DIGEST_BYTES)
        for array, size in arrays:
            digest.update(array[row, : -(-end // size)].tobytes())
        found.append(digest.hexdigest())
    return found


def device_block_digests(channel: Channel, tables: DeviceTables, ends: Sequence[int]) -> Any:
    """The same of tables on a device: something that a message may hold, which arrives when they have."""
    counts = [[-(-end // size) for end in ends] for size in tables.sizes]
    widths = [max(several, default=0) for several in counts]
    parts = [group[: len(ends), :width] for group, width in zip(tables.groups, widths, strict=True)]

    def convert(rows: Sequence[Sequence[int]]) -> list[str]:
        found = []
        for row, numbers in enumerate(rows):
            digest, start = blake2b(digest_size=DIGEST_BYTES), 0
            for several, width in zip(counts, widths, strict=True):
                digest.update(np.array(numbers[start : start + several[row]], np.int32).tobytes())
                start += width
            found.append(digest.hexdigest())
        return found

    return channel.later(torch.cat(parts, dim=1), convert)


def slot_digests(slots: Any, counts: Sequence[int]) -> list[str] | None:
    """A digest of the slots that each request's rows write; None where they are not in host memory."""
    if not isinstance(slots, torch.Tensor) or not slots.is_cpu or slots.shape[0] < sum(counts):
        return None
    array, start, found = slots.numpy(), 0, []
    for count in counts:
        rows = array[start : start + count].tobytes()
        found.append(blake2b(rows, digest_size=DIGEST_BYTES).hexdigest())
        start += count
    return found
