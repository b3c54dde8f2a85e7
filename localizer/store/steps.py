"""One step being recorded: its rows, what identifies them, and what came in for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from localizer.store.prefix import RequestPrefixes
from localizer.store.schema import (
    COLUMNS,
    DECIDES_TOKEN,
    DECODE,
    DIGEST_BYTES,
    DRAFT_PADDING,
    FEEDS_LOGITS,
    MOST_DRAFT_STEPS,
    PREFILL,
    PREFILL_CHUNK,
    VERIFY_ACCEPTED,
    VERIFY_REJECTED,
)
from localizer.wire.spec import ALL_ROWS, DRAFT_ROWS, LOGIT_ROWS, TOKEN_ROWS

NO_PREFIX = bytes(DIGEST_BYTES)
"""Prefix of a row that is not comparable with any: its earlier tokens are unknown, or it is padding."""


class StreamError(Exception):
    """The steps that came in contradict each other; the text says how."""


@dataclass(frozen=True)
class Batch:
    """Rows of several requests, one after the other: internal ids in batch order, and the rows of each."""

    spans: dict[str, range]
    tokens: Sequence[int]
    positions: Sequence[int]

    @classmethod
    def of(
        cls, requests: Sequence[str], counts: Sequence[int], tokens: Sequence[int], positions: Sequence[int]
    ) -> Batch:
        """Lay out `counts` rows of each request.

        Raises:
            StreamError: the numbers of rows, tokens and positions differ, or a request has no rows.
        """
        if len(requests) != len(counts) or min(counts, default=0) < 1:
            raise StreamError(f"a batch of {len(requests)} requests has row counts {list(counts)[:20]}")
        if not sum(counts) == len(tokens) == len(positions):
            raise StreamError(
                f"a batch has {sum(counts)} rows but {len(tokens)} tokens, {len(positions)} positions"
            )
        spans, start = {}, 0
        for request, count in zip(requests, counts, strict=True):
            spans[request] = range(start, start + count)
            start += count
        return cls(spans, tokens, positions)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Stored:
    """Rows of a site that are kept: their indices into the step, and their bytes, one after the other."""

    rows: list[int]
    data: bytes

    def only(self, which: Sequence[int]) -> Stored:
        """Those of the rows at these indices."""
        if len(which) == len(self.rows):
            return self
        width = len(self.data) // len(self.rows)
        cut = [self.data[index * width : (index + 1) * width] for index in which]
        return Stored([self.rows[index] for index in which], b"".join(cut))


@dataclass
class Step:
    """One step: the target's rows, then those of each draft step.

    Attributes:
        number: of the step within the capture, from 0.
        target: the target's batch.
        drafts: by internal id the number of draft tokens that the step verifies.
        columns: as `COLUMNS`, each a list over all rows.
        prefix: of each row.
        logit_rows: the target's rows that feed the logits; `feeding` is the same as a set.
        passes: for each draft step its batch, and where its rows start.
        proposing: for each draft step the row of each request from which it proposes; known at the end.
        deciding: the target's rows from which a token was taken; known at the end.
        stored: what is kept of the rows that came in, by site.
    """

    number: int
    target: Batch
    drafts: dict[str, int]
    columns: dict[str, list[int]]
    prefix: list[bytes]
    logit_rows: list[int]
    feeding: set[int] = field(default_factory=set)
    passes: list[tuple[int, Batch, int]] = field(default_factory=list)
    proposing: list[list[int]] = field(default_factory=list)
    deciding: list[int] = field(default_factory=list)
    stored: dict[int, list[Stored]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prefix)

    def expected_rows(self, which: str) -> Sequence[int]:
        """Rows on which a site is expected of the batch under way.

        Those from which a draft proposes are known at the end of the step: till then the first rows of the
        draft step stand for them.
        """
        if which == ALL_ROWS:
            return range(len(self.target))
        if which == LOGIT_ROWS:
            return self.logit_rows
        if which == TOKEN_ROWS:
            return self.deciding
        if not self.passes:
            return ()
        start, batch, _ = self.passes[-1]
        return range(start, start + (len(batch) if which == DRAFT_ROWS else len(batch.spans)))

    def proposals(self) -> Iterator[tuple[range, list[int]]]:
        """For each draft step the rows that stood for those from which it proposes, and those, at the end."""
        for (start, batch, _), rows in zip(self.passes, self.proposing, strict=True):
            yield range(start, start + len(batch.spans)), rows


@dataclass(frozen=True)
class Known:
    """What the steps of a round are described with: index and prefixes of each request, by internal id."""

    index: dict[str, int]
    prefixes: dict[str, RequestPrefixes]


def begin(
    number: int, batch: Batch, logit_counts: Sequence[int], known: Known, counts: dict[str, int]
) -> Step:
    """Describe the target's rows of a step; `counts` is the capture's, and is added to.

    Raises:
        StreamError: a request is unknown, or more rows should feed the logits than there are.
    """
    total = len(batch)
    columns = {name: [0] * total for name in COLUMNS}
    columns["token"], columns["position"] = list(batch.tokens), list(batch.positions)
    columns["step"], columns["sampled"] = [number] * total, [-1] * total
    step = Step(number, batch, {}, columns, [NO_PREFIX] * total, [])
    for (internal, span), feeds in zip(batch.spans.items(), logit_counts, strict=True):
        if not 0 <= feeds <= len(span):
            raise StreamError(
                f"step {number} has {len(span)} rows of {internal!r}, {feeds} of them for logits"
            )
        if internal not in known.index:
            raise StreamError(f"a step holds the unknown request {internal!r}")
        step.drafts[internal] = max(feeds - 1, 0)
        step.logit_rows += span[len(span) - feeds :]
        _describe(step, internal, span, known, counts)
    step.feeding.update(step.logit_rows)
    for row in step.logit_rows:
        columns["logits"][row] = FEEDS_LOGITS
    return step


def _describe(step: Step, internal: str, span: range, known: Known, counts: dict[str, int]) -> None:
    """Fill request, kind, prefix and occurrence of one request's rows."""
    prefixes, columns = known.prefixes[internal], step.columns
    length, index = len(prefixes.prompt), known.index[internal]
    first, last = columns["position"][span[0]], columns["position"][span[-1]]
    if first >= length:
        kind = DECODE
    else:
        kind = PREFILL if last >= length - 1 and not prefixes.started else PREFILL_CHUNK
    for row in span:
        position, token = columns["position"][row], columns["token"][row]
        columns["request"][row], columns["kind"][row] = index, kind
        if position < length and prefixes.prompt[position] != token:
            counts["prompt_mismatches"] += 1
        _identify(step, row, prefixes.row(position, token), counts)


def _identify(step: Step, row: int, found: tuple[bytes, int] | None, counts: dict[str, int]) -> None:
    if found is None:
        counts["rows_without_prefix"] += 1
    else:
        step.prefix[row], step.columns["occurrence"][row] = found


def add_pass(step: Step, batch: Batch, extra: int, known: Known) -> None:
    """Append the rows of one more draft step; what they are is known at the end of the step.

    Args:
        step: the step under way.
        batch: the draft's rows with its own input ids, in the order of the target's requests.
        extra: rows that the first draft step has for each request beyond those of the target (0 for EAGLE,
            whose inputs run ahead by one; 1 for a draft model, whose inputs do not).
        known: the round's requests.

    Raises:
        StreamError: the draft's requests are not the step's, or there are too many draft steps.
    """
    if list(batch.spans) != list(step.target.spans) or len(step.passes) == MOST_DRAFT_STEPS:
        raise StreamError(f"draft step {len(step.passes) + 1} of step {step.number} does not fit the step")
    start, total = len(step), len(batch)
    step.passes.append((start, batch, extra))
    for name, column in step.columns.items():
        if name in ("token", "position"):
            column += batch.tokens if name == "token" else batch.positions
        else:
            fill = {"step": step.number, "sampled": -1, "kind": DRAFT_PADDING}.get(name, 0)
            column += [fill] * total
    step.prefix += [NO_PREFIX] * total
    for internal, span in batch.spans.items():
        for row in span:
            step.columns["request"][start + row] = known.index[internal]


def finish(
    step: Step,
    sampled: Mapping[str, Sequence[int]],
    proposed: Mapping[str, Sequence[int]],
    known: Known,
    counts: dict[str, int],
) -> None:
    """Fill in what is known once the step's tokens are: decided tokens, acceptance, the draft's rows.

    Args:
        step: the step that ends.
        sampled: tokens taken from each request's logit rows, by internal id; none where they are discarded.
        proposed: draft tokens proposed for each request.
        known: the round's requests.
        counts: the capture's, and is added to.
    """
    step.proposing = [[] for _ in step.passes]
    for internal, span in step.target.spans.items():
        tokens = sampled.get(internal, ())
        drafts = step.drafts[internal]
        feeding = span[len(span) - drafts - 1 :]
        for row, token in zip(feeding, tokens, strict=False):
            if step.columns["logits"][row] == FEEDS_LOGITS:
                step.columns["sampled"][row], step.columns["logits"][row] = token, DECIDES_TOKEN
                step.deciding.append(row)
        rejected = max(drafts + 1 - max(len(tokens), 1), 0)
        if drafts:
            for index, row in enumerate(feeding):
                accepted = index <= drafts - rejected
                step.columns["kind"][row] = VERIFY_ACCEPTED if accepted else VERIFY_REJECTED
        if step.passes:
            _finish_drafts(step, internal, len(span) - rejected, proposed.get(internal, ()), known, counts)


def _finish_drafts(
    step: Step, internal: str, valid: int, proposed: Sequence[int], known: Known, counts: dict[str, int]
) -> None:
    """Describe one request's draft rows: `valid` of the target's rows were not rejected."""
    prefixes, columns = known.prefixes[internal], step.columns
    start, batch, extra = step.passes[0]
    span = batch.spans[internal]
    valid = min(valid + extra, len(span))
    counts["draft_padding_rows"] += len(span) - valid
    inputs = list(batch.tokens[span[0] : span[0] + valid])
    first, base = batch.positions[span[0]], batch.positions[span[valid - 1]]
    for number, (start, batch, _) in enumerate(step.passes, 1):
        rows = [start + row for row in batch.spans[internal]]
        if number == 1:
            rows, since = rows[:valid], 0
        else:
            since = len(inputs)
            inputs += [columns["token"][row] for row in rows]
        found = prefixes.draft_rows(number, base, first, 0 if extra else 1, inputs, since)
        for row, identity in zip(rows, found, strict=True):
            columns["kind"][row] = DRAFT_PADDING + number
            _identify(step, row, identity, counts)
        counts["draft_rows"] += len(rows)
        step.proposing[number - 1].append(rows[-1])
        columns["logits"][rows[-1]] = FEEDS_LOGITS
        if number <= len(proposed):
            columns["sampled"][rows[-1]], columns["logits"][rows[-1]] = proposed[number - 1], DECIDES_TOKEN
