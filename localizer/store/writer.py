"""Writing one rank of a capture: steps come in, digests are taken, shards and journal lines go out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from localizer.store import steps, tensors
from localizer.store.digest import ALGORITHMS, XXH3, row_digest, row_digests, shard_algorithm
from localizer.store.dtypes import NUMPY
from localizer.store.grid import Grid
from localizer.store.journal import append_journal
from localizer.store.prefix import RequestPrefixes
from localizer.store.schema import (
    COLUMNS,
    DIGEST_BYTES,
    KINDS,
    ROW_INDEX,
    Shard,
    Site,
)
from localizer.store.selection import EVERYTHING, Selection, Selector
from localizer.store.steps import Batch, Known, Step, Stored, StreamError
from localizer.wire.spec import ALL_ROWS, DRAFT_LOGIT_ROWS, DRAFT_ROWS, LOGIT_ROWS, TOKEN_ROWS

SHARD_ROWS = 4096
"""A shard is closed after this many rows ..."""

SHARD_BYTES = 64 << 20
"""... or this many bytes of payload, whichever comes first."""

TARGET_KINDS, DRAFT_KINDS = (ALL_ROWS, LOGIT_ROWS), (DRAFT_LOGIT_ROWS, DRAFT_ROWS)
ROW_KINDS = (*TARGET_KINDS, TOKEN_ROWS, *DRAFT_KINDS)
"""Which rows sites can be expected on."""

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
        phases: see `localizer.store.selection.Selector`.

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
        phases: Mapping[str, tuple[int, str]] | None = None,
    ) -> None:
        self._folder = folder
        self._place = f"rank-{rank}"
        (folder / self._place).mkdir(exist_ok=True)
        self._index = {request: number for number, request in enumerate(requests)}
        self._requests, self._prompts = list(requests), prompts
        self._selector = Selector(selection, phases)
        self._payload: frozenset[str] | None = frozenset()
        self._sites: list[Site] = []
        self._seen_order: list[int] = []
        # by site: bytes of a row as it comes in, index into ROW_KINDS, how many came in, whether rows are
        # kept, whether they come in as digests
        self._widths = self._kinds = self._recorded = np.zeros(0, np.int64)
        self._keeps = self._hashed = np.zeros(0, np.bool_)
        self._expected = dict.fromkeys(ROW_KINDS, 0)
        self._known = Known({}, {})
        self._step: Step | None = None
        # rows of the step under way on which sites are expected, kind after kind; how many; where they begin
        self._places = self._limits = self._starts = np.zeros(0, np.int64)
        # the shard under way: its finished steps, their rows, digests, and bytes of payload
        self._done: list[Step] = []
        self._rows = 0
        self._grid = Grid(SHARD_ROWS)
        self._bytes = 0
        self._shards = 0
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
        for site in sites:
            self.add_site(site)

    def add_site(self, site: Site) -> None:
        """Name one more site; one that is reached late is missing on all rows that came before."""
        keep = self._payload is None or site.name in self._payload
        self._sites.append(site)
        self._widths = np.append(self._widths, _UNKNOWN)
        self._kinds = np.append(self._kinds, ROW_KINDS.index(site.rows))
        self._keeps = np.append(self._keeps, keep)
        self._hashed = np.append(self._hashed, False)
        self._recorded = np.append(self._recorded, 0)
        self._grid.reach(0, len(self._sites))

    def layout(self, site: int, dtype: str, shape: Sequence[int], digest: str = XXH3) -> None:
        """Say dtype and row shape of a site, before its first rows; a site that changes them is dropped.

        Rows with another digest than the usual one come in as digests, and cannot be kept.
        """
        if dtype not in NUMPY:
            raise StreamError(f"rows of {self._sites[site].name} have the unknown dtype {dtype}")
        hashed = digest != XXH3
        if digest not in ALGORITHMS or (hashed and self._keeps[site]):
            raise StreamError(f"rows of {self._sites[site].name} came as digests ({digest}), of no use here")
        if self._widths[site] == _DROPPED:
            return
        old = self._sites[site]
        layout = dtype, tuple(shape), digest
        if self._recorded[site] and (old.dtype, old.shape, old.digest) != layout:
            self._widths[site] = _DROPPED
            self.complain(
                f"{old.name} changed from {old.dtype} {list(old.shape or ())} to {dtype} {list(shape)}; "
                "its later rows are not kept"
            )
            return
        self._sites[site] = msgspec.structs.replace(old, dtype=dtype, shape=tuple(shape), digest=digest)
        self._widths[site] = DIGEST_BYTES if hashed else math.prod(shape) * NUMPY[dtype].itemsize
        self._hashed[site] = hashed

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
        """Note the rows on which sites of each kind are expected, of the batch that has just begun."""
        step = self._step
        assert step is not None
        rows = [step.expected_rows(kind) for kind in ROW_KINDS]
        for kind in DRAFT_KINDS if step.passes else TARGET_KINDS:
            self._expected[kind] += len(rows[ROW_KINDS.index(kind)])
        self._limits = np.array([len(some) for some in rows])
        self._starts = np.cumsum(self._limits) - self._limits
        self._places = np.array([row for some in rows for row in some], np.int64)
        self._grid.reach(self._rows + len(step), len(self._sites))

    def rows(self, site: int, first: int, count: int, data: memoryview) -> None:
        """Take `count` rows of a site in C order, from row `first` of those on which it is expected."""
        width = len(data) // max(count, 1)
        self.frame(np.array([[site, first, count, width, width, 0]]), data)

    def frame(self, table: np.ndarray, body: memoryview) -> None:
        """Take rows of several tensors.

        Args:
            table: an entry for each tensor, as `localizer.wire.ring.ROWS` describes it, int64.
            body: the memory that the table points into.
        """
        if len(set(table[:, 0].tolist())) == len(table):
            self._take(table, body)
        else:
            for number in range(len(table)):
                self._take(table[number : number + 1], body)

    def _take(self, table: np.ndarray, body: memoryview) -> None:
        """Hash rows of tensors of different sites, and keep those that are wanted."""
        step = self._step
        widths = self._widths[table[:, 0]]
        if (widths == _DROPPED).any():
            table, widths = table[widths != _DROPPED], widths[widths != _DROPPED]
        sites, first, count, width, pace, offset = table.T
        kinds = self._kinds[sites]
        beyond = offset + pace * (count - 1) + width > len(body)
        if step is None or (beyond | (width != widths) | (first + count > self._limits[kinds])).any():
            raise self._contradiction(table)
        # from here on most arrays have an item for each row
        entry = np.repeat(np.arange(len(table)), count)
        ends = np.cumsum(count)
        index = np.arange(len(entry)) - (ends - count)[entry]
        column, rows = sites[entry], self._places[(self._starts[kinds] + first)[entry] + index]
        twice = self._grid.present[self._rows + rows, column]
        if twice.any():
            for site in dict.fromkeys(column[twice].tolist()):
                name = self._sites[site].name
                self.complain(f"{name} was reached more than once in a forward; the first time is kept")
            self._take(np.delete(table, entry[twice], 0), body)
            return
        begins = offset[entry] + index * pace[entry]
        spans = zip(begins.tolist(), (begins + width[entry]).tolist(), strict=True)
        cut = [body[begin:end] for begin, end in spans]
        self._record(sites, count, column, rows, cut)
        for number in np.flatnonzero(self._keeps[sites]).tolist():
            span = slice(ends[number] - count[number], ends[number])
            self._keep(step, int(sites[number]), rows[span].tolist(), cut[span])

    def _record(
        self,
        sites: np.ndarray,
        count: np.ndarray,
        column: np.ndarray,
        rows: np.ndarray,
        cut: list[memoryview],
    ) -> None:
        """Hash rows, unless they are digests already.

        `sites` are different from each other and have `count` rows, `column` is their site.
        """
        fresh = (self._recorded[sites] == 0) & (count > 0)
        if fresh.any():
            self._seen_order += sites[fresh].tolist()
        self._recorded[sites] += count
        if self._hashed[sites].any():
            done = self._hashed[column].tolist()
            found = b"".join(
                row if is_done else row_digest(XXH3, row) for row, is_done in zip(cut, done, strict=True)
            )
        else:
            found = row_digests(cut)
        self._grid.put(self._rows + rows, column, found)

    def _contradiction(self, table: np.ndarray) -> StreamError:
        """What is wrong with the first of the tensors that does not fit the step."""
        for site, first, count, width, *_ in table.tolist():
            what, known = self._sites[site], int(self._widths[site])
            if self._step is None or known == _UNKNOWN:
                return StreamError(f"rows of {what.name} came outside a step or before their layout")
            if width != known:
                return StreamError(
                    f"{count} rows of {what.name} should take {known * count} bytes, not {width * count}"
                )
            if first + count > self._limits[ROW_KINDS.index(what.rows)]:
                last = first + count - 1
                return StreamError(f"step {self._step.number} has no rows {first}..{last} for {what.name}")
        return StreamError("a table of rows points beyond its frame")

    def _keep(self, step: Step, site: int, rows: list[int], cut: list[memoryview]) -> None:
        """Keep the payload of the rows that are wanted; which of a draft's are is known at the end."""
        if self._sites[site].rows != DRAFT_LOGIT_ROWS:
            kept = self._kept(step, site, rows)
            rows, cut = [rows[index] for index in kept], [cut[index] for index in kept]
        step.stored.setdefault(site, []).append(Stored(rows, b"".join(cut)))

    def _kept(self, step: Step, site: int, rows: Sequence[int]) -> Sequence[int]:
        """Which of the rows of a site keep their payload, as indices."""
        if self._selector.everything:
            return range(len(rows))
        columns, last = step.columns, self._sites[site].rows != ALL_ROWS
        kept = []
        for index, row in enumerate(rows):
            request = self._requests[columns["request"][row]]
            if self._selector.wants(request, columns["position"][row], last or row in step.feeding):
                kept.append(index)
        return kept

    def _settle(self, step: Step) -> None:
        """Give the rows from which a draft proposed their places, and keep only those that are wanted."""
        places = dict(pair for before, after in step.proposals() for pair in zip(before, after, strict=True))
        if not places:
            return
        before, after = self._rows + np.array([*places]), self._rows + np.array([*places.values()])
        for site in np.flatnonzero(self._kinds == ROW_KINDS.index(DRAFT_LOGIT_ROWS)).tolist():
            self._grid.move(site, before, after)
            parts = step.stored.get(site, [])
            for number, part in enumerate(parts):
                rows = [places[row] for row in part.rows]
                parts[number] = Stored(rows, part.data).only(self._kept(step, site, rows))

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
        self._bytes += sum(len(part.data) for parts in step.stored.values() for part in parts)
        self._counts["steps"] += 1
        self._counts["rows"] += len(step.target)
        self._counts["logit_rows"] += len(step.logit_rows)
        if self._rows >= SHARD_ROWS or self._bytes >= SHARD_BYTES:
            self._flush()

    def _tokens(self, step: Step) -> None:
        """Record the decided tokens at the site for them, as int64."""
        rows = step.deciding
        self._expected[TOKEN_ROWS] += len(rows)
        data = memoryview(np.array([step.columns["sampled"][row] for row in rows], "<i8").tobytes())
        cut = [data[start : start + 8] for start in range(0, len(data), 8)]
        for site in np.flatnonzero(self._kinds == ROW_KINDS.index(TOKEN_ROWS)).tolist() if rows else ():
            if self._widths[site] == _UNKNOWN:
                self.layout(site, "int64", ())
            self._recorded[site] += len(rows)
            self._grid.put(self._rows + np.array(rows), site, row_digests(cut))
            if self._keeps[site]:
                self._keep(step, site, rows, cut)

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
            {name: self._expected[self._sites[index].rows] for name, index in named.items()},
            {name: int(self._recorded[index]) for name, index in named.items()},
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
        digests = self._grid.tensors(total, order)
        self._grid = Grid(SHARD_ROWS)
        self._grid.reach(0, len(self._sites))
        payload: dict[str, np.ndarray] = {}
        for site in order:
            stored = _placed(done, site)
            if stored:
                what = self._sites[site]
                raw = np.frombuffer(b"".join(part.data for _, part in stored), NUMPY[what.dtype])
                indices = np.concatenate([rows for rows, _ in stored])
                raw = raw.reshape(len(indices), *(what.shape or ()))
                if np.any(indices[1:] < indices[:-1]):
                    by_row = np.argsort(indices)
                    raw, indices = raw[by_row], indices[by_row]
                payload[what.name], payload[what.name + ROW_INDEX] = raw, indices
        self._shard("rows", number, table, {"kinds": KINDS})
        sites = [msgspec.to_builtins(self._sites[index]) for index in order]
        algorithm = shard_algorithm([self._sites[index].digest for index in order])
        self._shard("digests", number, digests, {"algorithm": algorithm, "sites": sites})
        if payload:
            self._shard("payload", number, payload, {})
        self._rows = self._bytes = 0

    def _shard(
        self, what: str, number: int, arrays: Mapping[str, np.ndarray], facts: Mapping[str, object]
    ) -> None:
        name = f"{self._place}/{what}-{number:05d}.safetensors"
        size, digest = tensors.write(self._folder / name, arrays, json.dumps(facts))
        append_journal(self._folder, Shard(name=name, size=size, xxh3_128=digest))


def _placed(done: Sequence[Step], site: int) -> list[tuple[np.ndarray, Stored]]:
    """What is kept of a site, with the row indices within the shard."""
    found, start = [], 0
    for step in done:
        for part in step.stored.get(site, ()):
            if part.rows:
                found.append((np.array(part.rows, np.int64) + start, part))
        start += len(step)
    return found


def execution_order(count: int, seen: Sequence[int]) -> list[int]:
    """Indices 0..count-1 in execution order: as `seen`, each unseen one after its predecessor."""
    order, known = list(seen), set(seen)
    for index in range(count):
        if index not in known:
            order.insert(order.index(index - 1) + 1 if index else 0, index)
    return order
