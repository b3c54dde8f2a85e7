"""The toy engine: it computes the rounds of a plan step by step, and a draft's proposals inside the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from toy import toy_proposal, toy_row

from localizer.store import schema
from localizer.store.digest import XXH3, row_digest
from localizer.store.prefix import draft_salt
from localizer.store.schema import Site
from localizer.store.trace import TraceWriter
from localizer.store.writer import RankWriter
from localizer.wire.spec import ALL_ROWS, DRAFT, DRAFT_ROWS, TOKEN_ROWS

if TYPE_CHECKING:
    from builders import Plan

REJECTED = 1
"""The input id of draft rows for rejected tokens: it could be any."""


class Request:
    """One request under way."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan, self.name, self.internal = plan, name, f"{name}-internal"
        self.prompt = len(plan.prompt(name))
        self.text = [*plan.prompt(name), *plan.tokens(name)]
        self.done = 0
        self.drafts: list[int] = []

    def next_rows(self) -> list[int]:
        """Input ids of the next step; none at the end."""
        left = max(self.prompt, len(self.text) - 1) - self.done
        if self.done < self.prompt:
            size = min(self.prompt - self.done, self.plan.chunk or self.prompt)
            return self.text[self.done : self.done + size]
        return [self.text[self.done], *self.drafts][:left]

    def accepted(self, rows: Sequence[int]) -> int:
        """How many of the rows have the request's own tokens: the others are rejected drafts."""
        own = self.text[self.done : self.done + len(rows)]
        return next(
            (i for i, (row, token) in enumerate(zip(rows, own, strict=False)) if row != token), len(own)
        )

    def proposal(self, base: int) -> list[int]:
        """The tokens that are proposed behind position `base` and the token after it."""
        if (self.name, base) in self.plan.proposals:
            return list(self.plan.proposals[self.name, base])
        known = self.text[: base + 2]
        for _ in range(self.plan.speculate):
            known.append(toy_proposal(known))
        return known[base + 2 :]


def record(writer: RankWriter, plan: Plan, trace: TraceWriter | None = None, rank: int = 0) -> None:
    """Compute the rounds one after the other: prompts in chunks, then token by token or draft by draft."""
    sites = plan.sites(rank)
    for index, site in enumerate(sites):
        writer.layout(index, site.dtype, site.shape or (), plan.digest(site))
    step = 0
    for names in schema.rounds(list(plan.matrix), plan.repeats):
        writer.round({f"{name}-internal": name for name in names})
        if trace is not None:
            trace.round({f"{name}-internal": name for name in names})
        requests = [Request(plan, name) for name in names]
        while scheduled := {request: rows for request in requests if (rows := request.next_rows())}:
            if step >= plan.cut.get(rank, step + 1):
                return
            if trace is not None:
                trace.step(schedule(step, scheduled))
            _step(writer, plan, sites, step, scheduled)
            step += 1


def schedule(step: int, scheduled: dict[Request, list[int]]) -> dict[str, Any]:
    """What a worker would tell of a step."""
    counts = [len(rows) for rows in scheduled.values()]
    return {
        "step": step,
        "requests": [it.internal for it in scheduled],
        "scheduled": counts,
        "computed": [it.done for it in scheduled],
        "cached": [0] * len(counts),
        "drafts": [len(rows) - 1 if it.done >= it.prompt else 0 for it, rows in scheduled.items()],
        "resumed": [],
        "preempted": [],
        "finished": [],
        "padded": sum(counts),
        "graph": "NONE",
        "batch": {"num_tokens": sum(counts), "uniform": False},
        "backend": {"max_query_len": max(counts), "causal": True},
        "blocks": ["00" * 16] * len(counts),
        "slots": None,
    }


def _step(
    writer: RankWriter, plan: Plan, sites: list[Site], step: int, scheduled: dict[Request, list[int]]
) -> None:
    feeds = [len(rows) if it.done >= it.prompt else 1 for it, rows in scheduled.items()]
    spots = [(it, it.done + i) for it, rows in scheduled.items() for i in range(len(rows))]
    writer.begin_step(
        step,
        [it.internal for it in scheduled],
        [len(rows) for rows in scheduled.values()],
        [token for rows in scheduled.values() for token in rows],
        [position for _, position in spots],
        feeds,
    )
    feeding = [
        (it, it.done + i)
        for (it, rows), count in zip(scheduled.items(), feeds, strict=True)
        for i in range(len(rows) - count, len(rows))
    ]
    for index, site in enumerate(sites):
        if site.name.startswith(DRAFT) or site.rows == TOKEN_ROWS:  # the writer itself records the tokens
            continue
        for row, (it, position) in enumerate(spots if site.rows == ALL_ROWS else feeding):
            text = [*it.text[: it.done], *scheduled[it]][: position + 1]
            _put(writer, plan, (it.name, position, site.name), index, row, toy_row(text, site))
    valid = {it: it.accepted(rows) for it, rows in scheduled.items()}
    sampled = {
        it.internal: it.text[max(it.done + 1, it.prompt) : it.done + valid[it] + 1]
        for it in scheduled
        if it.prompt <= it.done + valid[it] < len(it.text)
    }
    proposed = {it: it.proposal(it.done + valid[it] - 1) for it in scheduled} if plan.speculate else {}
    if proposed and plan.draft_layers:
        _draft(writer, plan, sites, scheduled, valid, proposed)
    writer.end_step(sampled, {it.internal: proposed[it] for it in proposed if it.internal in sampled})
    for it in scheduled:
        it.done += valid[it]
        it.drafts = proposed.get(it, [])


def _draft(
    writer: RankWriter,
    plan: Plan,
    sites: list[Site],
    scheduled: dict[Request, list[int]],
    valid: dict[Request, int],
    proposed: dict[Request, list[int]],
) -> None:
    """Run the draft steps: the first on the target's rows (a draft model's: and one more), then on one."""
    extra = int(plan.method == "draft_model")
    shift = 1 - extra
    inputs = {it: [*it.text, REJECTED][it.done + shift : it.done + valid[it] + 1] for it in scheduled}
    for number in range(1, plan.speculate + 1):
        batch: list[tuple[Request, int, list[int] | None]] = []  # with the tokens before, None for padding
        for it, rows in scheduled.items():
            known = it.text[shift : it.done + shift]
            if number > 1:
                inputs[it].append(proposed[it][number - 2])
            first = len(inputs[it]) - 1 if number > 1 else 0
            batch += [(it, it.done + i, known + inputs[it][: i + 1]) for i in range(first, len(inputs[it]))]
            if number == 1:
                batch += [(it, it.done + i, None) for i in range(len(inputs[it]), len(rows) + extra)]
        counts = [sum(it is other for other, _, _ in batch) for it in scheduled]
        tokens = [REJECTED if text is None else text[-1] for _, _, text in batch]
        names = [it.internal for it in scheduled]
        writer.draft_pass(names, counts, tokens, [position for _, position, _ in batch], extra)
        bases = {it: it.done + valid[it] - shift for it in scheduled}
        last = {it: row for row, (it, _, text) in enumerate(batch) if text is not None}
        for index, site in enumerate(sites):
            if not site.name.startswith(DRAFT):
                continue
            rows = range(len(batch)) if site.rows == DRAFT_ROWS else last.values()
            for place, row in enumerate(rows):
                it, position, text = batch[row]
                salt, peak = draft_salt(number, bases[it]), proposed[it][number - 1]
                array = toy_row(text or [REJECTED] * (position + 1), site, salt, peak)
                where = (it.name, position, f"{site.name}@{number if text is not None else 0}")
                _put(writer, plan, where, index, place, array)


def _put(
    writer: RankWriter, plan: Plan, where: tuple[str, int, str], site: int, row: int, array: np.ndarray
) -> None:
    if where not in plan.absent:
        array = plan.changes.get(where, lambda row: row)(array)
        raw = np.ascontiguousarray(array).tobytes()
        if plan.hashed and (algorithm := plan.digest(plan.sites()[site])) != XXH3:
            raw = row_digest(algorithm, raw)
        writer.rows(site, row, 1, memoryview(raw))
