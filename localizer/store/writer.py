"""Writing one rank of a capture: steps come in, digests are taken, shards and journal lines go out."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from localizer.store import tensors
from localizer.store.dtypes import NUMPY
from localizer.store.prefix import RequestPrefixes
from localizer.store.schema import (
    DECIDES_TOKEN,
    DIGEST,
    DIGEST_BYTES,
    FEEDS_LOGITS,
    JOURNAL,
    KINDS,
    Shard,
    Site,
)
from localizer.wire.spec import ALL_ROWS, TOKEN_ROWS

SHARD_ROWS = 4096
"""A shard is closed after this many rows ..."""

SHARD_BYTES = 64 << 20
"""... or this many bytes of payload, whichever comes first."""

COLUMNS: dict[str, np.dtype] = {
    "request": np.dtype(np.int32),
    "position": np.dtype(np.int32),
    "token": np.dtype(np.int64),
    "occurrence": np.dtype(np.int32),
    "step": np.dtype(np.int32),
    "kind": np.dtype(np.uint8),
    "logits": np.dtype(np.uint8),
    "sampled": np.dtype(np.int64),
}
"""The integer columns of the row table, each [rows]; `prefix` is uint8 [rows, 16] beside them."""

ROW_INDEX = "#rows"
"""Suffix of the payload tensor that holds the row indices (within the shard) of a site's stored rows."""


class StreamError(Exception):
    """The steps that came in contradict each other; the text says how."""


@dataclass
class _Step:
    """One step being recorded: `rows` rows, of which `logit_rows` (indices) feed the logits."""

    number: int
    columns: dict[str, np.ndarray]
    prefix: np.ndarray
    logit_rows: np.ndarray
    spans: dict[str, slice]
    digest: np.ndarray
    present: np.ndarray
    payload: dict[int, list[tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """What one rank recorded: sites in execution order, rows by site, counts, complaints."""

    sites: list[Site]
    expected: dict[str, int]
    recorded: dict[str, int]
    counts: dict[str, int]
    complaints: list[str]


class RankWriter:
    """Turns the stream of one worker into the shards of `rank-N/`.

    Args:
        folder: the capture's folder, which exists.
        rank: number of the worker.
        requests: request ids in the order of the workload; the row table's `request` is an index into it.
        prompts: token ids of each request's prompt, in the same order.

    Raises (every method):
        OSError: a shard cannot be written.
        StreamError: the stream contradicts itself.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        requests: Sequence[str],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self._folder = folder
        self._place = f"rank-{rank}"
        (folder / self._place).mkdir(exist_ok=True)
        self._index = {request: number for number, request in enumerate(requests)}
        self._prompts = prompts
        self._payload: frozenset[str] | None = frozenset()
        self._sites: list[Site] = []
        self._seen_order: list[int] = []
        self._names: dict[str, str] = {}
        self._prefixes: dict[str, RequestPrefixes] = {}
        self._step: _Step | None = None
        self._done: list[_Step] = []
        self._rows = 0
        self._bytes = 0
        self._shards = 0
        self._expected: dict[int, int] = {}
        self._recorded: dict[int, int] = {}
        self._counts = {
            "steps": 0,
            "rows": 0,
            "logit_rows": 0,
            "rows_without_prefix": 0,
            "prompt_mismatches": 0,
        }
        self._complaints: list[str] = []

    # -- the stream ------------------------------------------------------------------------------------

    def register(self, sites: Sequence[Site], payload: frozenset[str] | None) -> None:
        """Name the expected sites in model order, and those whose rows are kept (None keeps all)."""
        self._payload = payload
        self._sites = list(sites)
        self._expected = dict.fromkeys(range(len(sites)), 0)
        self._recorded = dict.fromkeys(range(len(sites)), 0)

    def layout(self, site: int, dtype: str, shape: Sequence[int]) -> None:
        """Say dtype and row shape of a site, before its first rows and whenever they change."""
        if dtype not in NUMPY:
            raise StreamError(f"rows of {self._sites[site].name} have the unknown dtype {dtype}")
        old = self._sites[site]
        if old.shape is not None and (old.dtype, old.shape) != (dtype, tuple(shape)):
            if self._step is not None and self._step.present[:, site].any():
                raise StreamError(f"rows of {old.name} change their layout within a step")
            self._flush()
        self._sites[site] = msgspec.structs.replace(old, dtype=dtype, shape=tuple(shape))

    def round(self, names: Mapping[str, str]) -> None:
        """Start a round: `names` maps vLLM's internal request ids to ours."""
        self._names = dict(names)
        self._prefixes = {
            internal: RequestPrefixes(self._prompts[self._index[name]]) for internal, name in names.items()
        }

    def begin_step(
        self,
        number: int,
        requests: Sequence[str],
        counts: Sequence[int],
        tokens: Sequence[int],
        positions: Sequence[int],
        logit_counts: Sequence[int],
    ) -> None:
        """Start a step: for each request (internal id, batch order) its number of rows and of logit rows.

        `tokens` and `positions` are those of all rows, concatenated in batch order.
        """
        if self._step is not None:
            self.end_step({})
        total = sum(counts)
        if len(tokens) != total or len(positions) != total:
            raise StreamError(
                f"step {number} has {total} rows but {len(tokens)} tokens, {len(positions)} positions"
            )
        columns = {name: np.zeros(total, dtype) for name, dtype in COLUMNS.items()}
        columns["token"][:], columns["position"][:], columns["step"][:] = tokens, positions, number
        columns["sampled"][:] = -1
        prefix = np.zeros((total, DIGEST_BYTES), np.uint8)
        spans, start = {}, 0
        for internal, count, feeds in zip(requests, counts, logit_counts, strict=True):
            if not 0 <= feeds <= count or not count:
                raise StreamError(
                    f"step {number} has {count} rows of {internal!r}, {feeds} of them for logits"
                )
            span = spans[internal] = slice(start, start + count)
            self._describe(internal, span, columns, prefix)
            columns["logits"][span.stop - feeds : span.stop] = FEEDS_LOGITS
            start += count
        self._step = _Step(
            number,
            columns,
            prefix,
            np.flatnonzero(columns["logits"]),
            spans,
            np.zeros((total, len(self._sites), DIGEST_BYTES), np.uint8),
            np.zeros((total, len(self._sites)), np.bool_),
        )
        for index, site in enumerate(self._sites):
            if site.rows != TOKEN_ROWS:
                self._expected[index] += total if site.rows == ALL_ROWS else len(self._step.logit_rows)

    def _describe(
        self, internal: str, span: slice, columns: dict[str, np.ndarray], prefix: np.ndarray
    ) -> None:
        """Fill request, prefix, occurrence and kind of one request's rows of a step."""
        if internal not in self._names:
            raise StreamError(f"a step holds the unknown request {internal!r}")
        columns["request"][span] = self._index[self._names[internal]]
        prefixes = self._prefixes[internal]
        length = len(prefixes.prompt)
        first, last = int(columns["position"][span.start]), int(columns["position"][span.stop - 1])
        if first >= length:
            kind = "decode"
        else:
            kind = "prefill" if last >= length - 1 and not prefixes.started else "prefill-chunk"
        columns["kind"][span] = KINDS.index(kind)
        for row in range(span.start, span.stop):
            position, token = int(columns["position"][row]), int(columns["token"][row])
            if position < length and prefixes.prompt[position] != token:
                self._counts["prompt_mismatches"] += 1
            found = prefixes.row(position, token)
            if found is None:
                self._counts["rows_without_prefix"] += 1
                continue
            prefix[row] = np.frombuffer(found[0], np.uint8)
            columns["occurrence"][row] = found[1]

    def rows(self, site: int, first: int, count: int, data: memoryview) -> None:
        """Take `count` rows of a site in C order, from row `first` on (of the step, or of its logit rows)."""
        step, what = self._step, self._sites[site]
        if step is None or what.shape is None:
            raise StreamError(f"rows of {what.name} came outside a step or before their layout")
        width = math.prod(what.shape) * NUMPY[what.dtype].itemsize
        if len(data) != width * count:
            raise StreamError(
                f"{count} rows of {what.name} should take {width * count} bytes, not {len(data)}"
            )
        every = np.arange(len(step.prefix)) if what.rows == ALL_ROWS else step.logit_rows
        target = every[first : first + count]
        if len(target) != count:
            raise StreamError(f"step {step.number} has no rows {first}..{first + count - 1} for {what.name}")
        self._record(step, site, target, data)

    def _record(self, step: _Step, site: int, target: np.ndarray, data: memoryview) -> None:
        """Hash the rows in `data`, one for each row index of `target`, and keep them if they are wanted."""
        what, count = self._sites[site], len(target)
        if not count:
            return
        if step.present[target, site].any():
            self.complain(f"{what.name} was reached more than once in a forward; the first time is kept")
            return
        width = len(data) // count
        if not self._recorded[site]:
            self._seen_order.append(site)
        digests = b"".join(
            xxhash.xxh3_128_digest(data[index * width : (index + 1) * width]) for index in range(count)
        )
        step.digest[target, site] = np.frombuffer(digests, np.uint8).reshape(count, DIGEST_BYTES)
        step.present[target, site] = True
        self._recorded[site] += count
        if self._payload is None or what.name in self._payload:
            kept = np.frombuffer(bytes(data), NUMPY[what.dtype]).reshape(count, *(what.shape or ()))
            step.payload.setdefault(site, []).append((target, kept))
            self._bytes += len(data)

    def end_step(self, sampled: Mapping[str, Sequence[int]]) -> None:
        """Finish a step; `sampled` maps internal ids to the tokens taken from their logit rows, in order."""
        step = self._step
        if step is None:
            raise StreamError("a step ended that had not begun")
        for internal, tokens in sampled.items():
            span = step.spans.get(internal)
            if span is None or not tokens:
                continue
            feeding = np.flatnonzero(step.columns["logits"][span])[: len(tokens)] + span.start
            step.columns["sampled"][feeding] = tokens[: len(feeding)]
            step.columns["logits"][feeding] = DECIDES_TOKEN
        self._tokens(step)
        self._step = None
        self._done.append(step)
        self._rows += len(step.prefix)
        self._counts["steps"] += 1
        self._counts["rows"] += len(step.prefix)
        self._counts["logit_rows"] += len(step.logit_rows)
        if self._rows >= SHARD_ROWS or self._bytes >= SHARD_BYTES:
            self._flush()

    def _tokens(self, step: _Step) -> None:
        """Record the decided tokens at the site for them, as int64."""
        deciding = np.flatnonzero(step.columns["logits"] == DECIDES_TOKEN)
        for site, what in enumerate(self._sites):
            if what.rows == TOKEN_ROWS and len(deciding):
                self.layout(site, "int64", ())
                self._expected[site] += len(deciding)
                tokens = step.columns["sampled"][deciding].astype("<i8")
                self._record(step, site, deciding, memoryview(tokens.tobytes()))

    def complain(self, text: str) -> None:
        """Note something that makes the capture incomplete."""
        if text not in self._complaints:
            self._complaints.append(text)

    def close(self) -> Summary:
        """Write what is left and say what was recorded."""
        if self._step is not None:
            self.complain("the last step was cut off")
            self._step = None
        self._flush()
        order = execution_order(len(self._sites), self._seen_order)
        named = {self._sites[index].name: index for index in order}
        return Summary(
            [self._sites[index] for index in order],
            {name: self._expected[index] for name, index in named.items()},
            {name: self._recorded[index] for name, index in named.items()},
            dict(self._counts),
            list(self._complaints),
        )

    # -- shards ----------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Write the finished steps as one set of shards and journal them."""
        if not self._done:
            return
        steps, self._done = self._done, []
        number, self._shards = self._shards, self._shards + 1
        starts = np.cumsum([0, *(len(step.prefix) for step in steps)])
        order = execution_order(len(self._sites), self._seen_order)
        table = {name: np.concatenate([step.columns[name] for step in steps]) for name in COLUMNS}
        table["prefix"] = np.concatenate([step.prefix for step in steps])
        self._shard("rows", number, table, {"kinds": KINDS})
        present = np.concatenate([step.present for step in steps])[:, order]
        digest = np.concatenate([step.digest for step in steps])[:, order]
        sites = [msgspec.to_builtins(self._sites[index]) for index in order]
        self._shard(
            "digests",
            number,
            {"digest": digest, "present": np.packbits(present, axis=1, bitorder="little")},
            {"algorithm": DIGEST, "sites": sites},
        )
        payload: dict[str, np.ndarray] = {}
        for index in order:
            parts = [
                (rows + start, kept)
                for step, start in zip(steps, starts, strict=False)
                for rows, kept in step.payload.get(index, [])
            ]
            if parts:
                name = self._sites[index].name
                payload[name] = np.concatenate([kept for _, kept in parts])
                payload[name + ROW_INDEX] = np.concatenate([rows for rows, _ in parts]).astype(np.int64)
        if payload:
            self._shard("payload", number, payload, {})
        self._rows = self._bytes = 0

    def _shard(
        self, what: str, number: int, arrays: Mapping[str, np.ndarray], facts: Mapping[str, object]
    ) -> None:
        name = f"{self._place}/{what}-{number:05d}.safetensors"
        size, digest = tensors.write(self._folder / name, arrays, json.dumps(facts))
        append_journal(self._folder, Shard(name=name, size=size, xxh3_128=digest))


def append_journal(folder: Path, shard: Shard) -> None:
    """Add one line to the journal and make it durable."""
    with (folder / JOURNAL).open("ab") as handle:
        handle.write(msgspec.json.encode(shard) + b"\n")
        handle.flush()
        os.fsync(handle.fileno())


def execution_order(count: int, seen: Sequence[int]) -> list[int]:
    """Indices 0..count-1 in execution order: as `seen`, each unseen one after its predecessor."""
    order = list(seen)
    for index in range(count):
        if index not in seen:
            order.insert(order.index(index - 1) + 1 if index else 0, index)
    return order
