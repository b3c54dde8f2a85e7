"""Writing one rank of a capture: steps come in, digests are taken, shards and journal lines go out."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from localizer.store import steps, tensors
from localizer.store.dtypes import NUMPY
from localizer.store.prefix import RequestPrefixes
from localizer.store.schema import (
    DECIDES_TOKEN,
    DIGEST,
    DIGEST_BYTES,
    JOURNAL,
    KINDS,
    Shard,
    Site,
)
from localizer.store.selection import EVERYTHING, Selection, Selector
from localizer.store.steps import COLUMNS, Batch, Known, Part, Step, StreamError
from localizer.wire.spec import ALL_ROWS, DRAFT_LOGIT_ROWS, DRAFT_ROWS, TOKEN_ROWS

SHARD_ROWS = 4096
"""A shard is closed after this many rows ..."""

SHARD_BYTES = 64 << 20
"""... or this many bytes of payload, whichever comes first."""

ROW_INDEX = "#rows"
"""Suffix of the payload tensor that holds the row indices (within the shard) of a site's stored rows."""


_UNKNOWN, _DROPPED = -1, -2
"""In place of a row's width: before its layout is known, and after it has changed."""


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

    However long the stream is, what is held is bounded: the steps of one shard and the one under way, tokens
    and prefixes of the requests of one round, and a few numbers and at most two complaints a site.

    Args:
        folder: the capture's folder, which exists.
        rank: number of the worker.
        requests: request ids in the order of the workload; the row table's `request` is an index into it.
        prompts: token ids of each request's prompt, in the same order.
        selection: the rows that keep their payload, at the sites that keep any.

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
        selection: Selection = EVERYTHING,
    ) -> None:
        self._folder = folder
        self._place = f"rank-{rank}"
        (folder / self._place).mkdir(exist_ok=True)
        self._index = {request: number for number, request in enumerate(requests)}
        self._requests, self._prompts = list(requests), prompts
        self._selector = Selector(selection)
        self._payload: frozenset[str] | None = frozenset()
        self._sites: list[Site] = []
        self._widths: list[int] = []
        self._seen_order: list[int] = []
        self._known = Known({}, {})
        self._step: Step | None = None
        self._done: list[Step] = []
        self._rows = 0
        self._bytes = 0
        self._shards = 0
        self._expected: dict[int, int] = {}
        self._recorded: dict[int, int] = {}
        self._begun: dict[str, int] = {}
        self._counts = {
            "steps": 0,
            "rows": 0,
            "logit_rows": 0,
            "draft_rows": 0,
            "draft_padding_rows": 0,
            "rows_without_prefix": 0,
            "prompt_mismatches": 0,
        }
        self._complaints: list[str] = []

    # -- the stream ------------------------------------------------------------------------------------

    def register(self, sites: Sequence[Site], payload: frozenset[str] | None) -> None:
        """Name the expected sites in model order, and those whose rows are kept (None keeps all)."""
        self._payload = payload
        self._sites = list(sites)
        self._widths = [_UNKNOWN] * len(sites)
        self._expected = dict.fromkeys(range(len(sites)), 0)
        self._recorded = dict.fromkeys(range(len(sites)), 0)

    def add_site(self, site: Site) -> None:
        """Name one more site, reached for the first time; it is missing on all rows that came before."""
        self._sites.append(site)
        self._widths.append(_UNKNOWN)
        self._expected[len(self._sites) - 1] = self._begun.get(site.rows, 0)
        self._recorded[len(self._sites) - 1] = 0

    def layout(self, site: int, dtype: str, shape: Sequence[int]) -> None:
        """Say dtype and row shape of a site, before its first rows; a site that changes them is dropped."""
        if dtype not in NUMPY:
            raise StreamError(f"rows of {self._sites[site].name} have the unknown dtype {dtype}")
        if self._widths[site] == _DROPPED:
            return
        old = self._sites[site]
        if self._recorded[site] and (old.dtype, old.shape) != (dtype, tuple(shape)):
            self._widths[site] = _DROPPED
            self.complain(
                f"{old.name} changed from {old.dtype} {list(old.shape or ())} to {dtype} {list(shape)}; "
                "its later rows are not kept"
            )
            return
        self._sites[site] = msgspec.structs.replace(old, dtype=dtype, shape=tuple(shape))
        self._widths[site] = math.prod(shape) * NUMPY[dtype].itemsize

    def round(self, names: Mapping[str, str]) -> None:
        """Start a round: `names` maps vLLM's internal request ids to ours."""
        index = {internal: self._index[name] for internal, name in names.items()}
        prefixes = {internal: RequestPrefixes(self._prompts[number]) for internal, number in index.items()}
        self._known = Known(index, prefixes)

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
        batch = Batch.of(requests, counts, tokens, positions)
        self._step = steps.begin(number, batch, logit_counts, self._known, self._counts)
        if not self._selector.everything:
            names = [self._name(internal) for internal, span in batch.spans.items() for _ in span]
            self._selector.begin(names, positions)
        self._expect()

    def draft_pass(
        self,
        requests: Sequence[str],
        counts: Sequence[int],
        tokens: Sequence[int],
        positions: Sequence[int],
        extra: int,
    ) -> None:
        """Start the next draft step of the step under way; see `localizer.store.steps.add_pass`."""
        if self._step is None:
            raise StreamError("a draft step came outside a step")
        steps.add_pass(self._step, Batch.of(requests, counts, tokens, positions), extra, self._known)
        self._expect()

    def _expect(self) -> None:
        """Count the rows that every site should have of the batch that has just begun."""
        step = self._step
        assert step is not None
        drafting = bool(step.passes)
        which = DRAFT_ROWS if drafting else ALL_ROWS
        self._begun[which] = self._begun.get(which, 0) + len(step.expected_rows(which) or ())
        for index, site in enumerate(self._sites):
            if site.rows == DRAFT_LOGIT_ROWS and drafting:
                self._expected[index] += len(step.passes[-1][1].spans)
            elif (site.rows == DRAFT_ROWS) == drafting:
                self._expected[index] += len(step.expected_rows(site.rows) or ())

    def rows(self, site: int, first: int, count: int, data: memoryview) -> None:
        """Take `count` rows of a site in C order, from row `first` of those on which it is expected."""
        step, what, width = self._step, self._sites[site], self._widths[site]
        if width == _DROPPED:
            return
        if step is None or width == _UNKNOWN:
            raise StreamError(f"rows of {what.name} came outside a step or before their layout")
        if len(data) != width * count:
            raise StreamError(
                f"{count} rows of {what.name} should take {width * count} bytes, not {len(data)}"
            )
        every = step.expected_rows(what.rows)
        limit = len(every) if every is not None else len(step.passes[-1][1].spans) if step.passes else 0
        if first + count > limit:
            raise StreamError(f"step {step.number} has no rows {first}..{first + count - 1} for {what.name}")
        if not count:
            return
        key = site, len(step.passes) if what.rows in (DRAFT_ROWS, DRAFT_LOGIT_ROWS) else 0
        covered = step.covered.setdefault(key, [])
        if any(first < taken.stop and taken.start < first + count for taken in covered):
            self.complain(f"{what.name} was reached more than once in a forward; the first time is kept")
            return
        covered.append(range(first, first + count))
        if every is None:
            self._record(step, site, range(first, first + count), data, len(step.passes))
        else:
            self._record(step, site, every[first : first + count], data)

    def _record(
        self, step: Step, site: int, rows: Sequence[int], data: memoryview, draft_pass: int = 0
    ) -> None:
        """Hash rows, those of the step named by `rows`, and keep them if they are wanted."""
        if not self._recorded[site] and self._sites[site].rows != TOKEN_ROWS:  # tokens come out of order
            self._seen_order.append(site)
        count = len(rows)
        width = len(data) // count
        cut = [data[row * width : (row + 1) * width] for row in range(count)]
        digests = b"".join(map(xxhash.xxh3_128_digest, cut))
        self._recorded[site] += count
        kept = range(count) if draft_pass and self._keeps(site) else self._kept(step, site, rows)
        stored = bytes(data) if len(kept) == count else b"".join(cut[row] for row in kept)
        self._bytes += len(stored)
        step.parts.setdefault(site, []).append(Part(rows, digests, stored, kept, draft_pass))

    def _settle(self, step: Step) -> None:
        """Give the rows from which a draft proposed their places, and keep only those that are wanted."""
        for site, parts in step.parts.items():
            for part in parts:
                if part.draft_pass:
                    proposing = step.proposing[part.draft_pass - 1]
                    part.rows = [proposing[index] for index in part.rows]
                    kept = self._kept(step, site, part.rows)
                    if part.kept and len(kept) < len(part.rows):
                        width = len(part.data) // len(part.rows)
                        part.data = b"".join(part.data[row * width : (row + 1) * width] for row in kept)
                        part.kept = kept

    def _keeps(self, site: int) -> bool:
        return self._payload is None or self._sites[site].name in self._payload

    def _kept(self, step: Step, site: int, rows: Sequence[int]) -> Sequence[int]:
        """Which of the rows that came in for a site keep their payload."""
        if not self._keeps(site):
            return ()
        if self._selector.everything:
            return range(len(rows))
        columns, last = step.columns, self._sites[site].rows != ALL_ROWS
        kept = []
        for index, row in enumerate(rows):
            request = self._requests[columns["request"][row]]
            if self._selector.wants(request, columns["position"][row], last or row in step.feeding):
                kept.append(index)
        return kept

    def _name(self, internal: str) -> str:
        return self._requests[self._known.index[internal]]

    def end_step(
        self, sampled: Mapping[str, Sequence[int]], proposed: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Finish a step.

        `sampled` maps internal ids to the tokens taken from their logit rows, in order; `proposed` to the
        draft tokens that were then proposed.
        """
        step = self._step
        if step is None:
            raise StreamError("a step ended that had not begun")
        steps.finish(step, sampled, proposed or {}, self._known, self._counts)
        self._tokens(step)
        self._settle(step)
        self._step = None
        self._done.append(step)
        self._rows += len(step)
        self._counts["steps"] += 1
        self._counts["rows"] += len(step.target)
        self._counts["logit_rows"] += len(step.logit_rows)
        if self._rows >= SHARD_ROWS or self._bytes >= SHARD_BYTES:
            self._flush()

    def _tokens(self, step: Step) -> None:
        """Record the decided tokens at the site for them, as int64."""
        logits = step.columns["logits"]
        deciding = [row for row in step.logit_rows if logits[row] == DECIDES_TOKEN]
        for site, what in enumerate(self._sites):
            if what.rows == TOKEN_ROWS and deciding:
                self.layout(site, "int64", ())
                self._expected[site] += len(deciding)
                tokens = np.array([step.columns["sampled"][row] for row in deciding], "<i8")
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
        done, self._done = self._done, []
        number, self._shards = self._shards, self._shards + 1
        order = execution_order(len(self._sites), self._seen_order)
        total = sum(map(len, done))
        table = {
            name: np.array([value for step in done for value in step.columns[name]], dtype)
            for name, dtype in COLUMNS.items()
        }
        table["prefix"] = np.frombuffer(b"".join(prefix for step in done for prefix in step.prefix), np.uint8)
        table["prefix"] = table["prefix"].reshape(total, DIGEST_BYTES)
        digest = np.zeros((total, len(order), DIGEST_BYTES), np.uint8)
        present = np.zeros((total, len(order)), np.bool_)
        payload: dict[str, np.ndarray] = {}
        for column, site in enumerate(order):
            parts = _placed(done, site)
            if parts:
                rows = np.concatenate([rows for rows, _ in parts])
                joined = b"".join(part.digests for _, part in parts)
                digest[rows, column] = np.frombuffer(joined, np.uint8).reshape(-1, DIGEST_BYTES)
                present[rows, column] = True
            stored = [(rows[list(part.kept)], part.data) for rows, part in parts if part.kept]
            if stored:
                what = self._sites[site]
                raw = np.frombuffer(b"".join(data for _, data in stored), NUMPY[what.dtype])
                indices = np.concatenate([rows for rows, _ in stored])
                payload[what.name] = raw.reshape(len(indices), *(what.shape or ()))
                payload[what.name + ROW_INDEX] = indices
        self._shard("rows", number, table, {"kinds": KINDS})
        sites = [msgspec.to_builtins(self._sites[index]) for index in order]
        bits = np.packbits(present, axis=1, bitorder="little")
        self._shard(
            "digests", number, {"digest": digest, "present": bits}, {"algorithm": DIGEST, "sites": sites}
        )
        if payload:
            self._shard("payload", number, payload, {})
        self._rows = self._bytes = 0

    def _shard(
        self, what: str, number: int, arrays: Mapping[str, np.ndarray], facts: Mapping[str, object]
    ) -> None:
        name = f"{self._place}/{what}-{number:05d}.safetensors"
        size, digest = tensors.write(self._folder / name, arrays, json.dumps(facts))
        append_journal(self._folder, Shard(name=name, size=size, xxh3_128=digest))


def _placed(done: Sequence[Step], site: int) -> list[tuple[np.ndarray, Part]]:
    """What came in for a site, with the row indices within the shard."""
    found, start = [], 0
    for step in done:
        for part in step.parts.get(site, ()):
            found.append((np.array(part.rows, np.int64) + start, part))
        start += len(step)
    return found


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
