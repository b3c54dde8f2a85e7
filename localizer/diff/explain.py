"""Says of a finished diff how its rows were paired, why others were not, and what followed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from localizer.diff import plan
from localizer.diff.align import BY_REQUEST, WITHIN, Alignment, keyed, others
from localizer.diff.compare import Comparison, same_layout
from localizer.diff.order import CausalOrder
from localizer.diff.record import Both
from localizer.diff.result import DIVERGED, IDENTICAL, INCONCLUSIVE, Coverage, Reason
from localizer.diff.tokens import TokenComparison, numbering
from localizer.diff.unpaired import past_difference
from localizer.store.digest import XXH3
from localizer.store.expected import is_draft
from localizer.store.reader import Capture
from localizer.store.schema import DRAFT_PADDING, KINDS, VERIFY_REJECTED

FIRST_SHOWN = 5
"""Places of the causal order that a plan names."""


@dataclass(frozen=True)
class Steps:
    """What the steps of a diff gave, from which its plan is told."""

    candidate: Capture
    parent: Capture
    alignment: Alignment
    parity: TokenComparison
    comparison: Comparison
    order: CausalOrder
    coverage: Coverage
    obstacles: list[Reason]
    incomplete: list[Reason]
    differ: bool


def explain(steps: Steps) -> plan.Plan:
    """The plan of all four steps."""
    alignment, coverage, differ = steps.alignment, steps.coverage, steps.differ
    layout = same_layout(steps.candidate, steps.parent, alignment)
    return plan.Plan(
        align=align_plan(steps),
        compare=plan.ComparePlan(
            digest=_algorithms(steps.candidate, alignment),
            compared=coverage.pairs.compared,
            differ=coverage.pairs.differ,
            missing=coverage.pairs.missing,
            other_layout=[name for name, same in zip(alignment.sites, layout, strict=True) if not same],
        ),
        localize=_localize_plan(steps),
        verdict=[
            plan.Rule(rule="not-comparable", holds=bool(steps.obstacles), verdict=INCONCLUSIVE),
            plan.Rule(rule="difference", holds=differ, verdict=DIVERGED),
            plan.Rule(rule="incomplete", holds=bool(steps.incomplete), verdict=INCONCLUSIVE),
            plan.Rule(rule="otherwise", holds=True, verdict=IDENTICAL),
        ],
    )


def _algorithms(capture: Capture, alignment: Alignment) -> str:
    """Of the digests that were compared."""
    columns = alignment.candidate_sites.tolist()
    return " and ".join(sorted({capture.sites[column].digest for column in columns})) or XXH3


def align_plan(steps: Steps) -> plan.AlignPlan:
    """How rows and sites were paired, and why others were not."""
    one, other, alignment = steps.candidate, steps.parent, steps.alignment
    keys = _keys(one, other, alignment)
    firsts = (
        {request.candidate: request.first for request in steps.parity.requests},
        {request.parent: request.first for request in steps.parity.requests},
    )
    sides = [
        _Side(one, other, keys[0], keys[1], firsts[0], alignment, alignment.candidate),
        _Side(other, one, keys[1], keys[0], firsts[1], alignment, alignment.parent),
    ]
    sites, differ = steps.coverage.sites, steps.comparison.differ.any()
    return plan.AlignPlan(
        key=alignment.by,
        rounds=Both(candidate=len(_sizes(one)), parent=len(_sizes(other))),
        rows=Both(candidate=len(one.table), parent=len(other.table)),
        paired=len(alignment),
        round_pairs=_round_pairs(one, other, alignment, differ),
        kind_pairs=_kind_pairs(one, other, alignment, differ),
        repeated=Both(candidate=sides[0].repeated(), parent=sides[1].repeated()),
        unpaired=Both(candidate=sides[0].unpaired(), parent=sides[1].unpaired()),
        shared=sites.shared,
        candidate_only=sites.candidate_only,
        parent_only=sites.parent_only,
        not_applicable=sites.not_applicable,
    )


def _keys(one: Capture, other: Capture, alignment: Alignment) -> list[np.ndarray]:
    if alignment.by == WITHIN:
        return keyed(one.table, with_request=False) * 2
    return keyed(one.table, other.table, with_request=alignment.by == BY_REQUEST)


@dataclass(frozen=True)
class _Side:
    """The rows of one capture, and what is known of their counterparts in the other.

    Attributes:
        keys, other_keys: of all rows of both tables, see `localizer.diff.align.keyed`.
        first: by request the output index of its first different token.
        paired: rows that are paired.
    """

    capture: Capture
    other: Capture
    keys: np.ndarray
    other_keys: np.ndarray
    first: Mapping[str, int | None]
    alignment: Alignment
    paired: np.ndarray

    def repeated(self) -> plan.Repeated:
        """Keys of more than one row."""
        rows = np.flatnonzero(self.keys)
        _, start, group, counts = np.unique(
            self.keys[rows], return_index=True, return_inverse=True, return_counts=True
        )
        many = counts[group] > 1
        again = rows[many & (np.arange(len(rows)) != start[group])]
        return plan.Repeated(
            keys=int((counts > 1).sum()),
            rows=int(many.sum()),
            paired=int(np.isin(rows[many], self.paired).sum()),
            example=_example(self.capture, int(again[0])) if len(again) else None,
        )

    def unpaired(self) -> list[plan.UnpairedRows]:
        """The rows without a counterpart by reason, in the order of `plan.UNPAIRED`."""
        rows = others(self.paired, len(self.capture.table))
        reasons = self._within(rows) if self.alignment.by == WITHIN else self._between(rows)
        found, left = [], np.ones(len(rows), np.bool_)
        for reason in plan.UNPAIRED:
            holds = left & reasons.get(reason, np.zeros(len(rows), np.bool_))
            left &= ~holds
            if holds.any():
                where = rows[holds]
                example = _example(self.capture, int(where[0]))
                found.append(plan.UnpairedRows(reason=reason, rows=len(where), example=example))
        return found

    def _within(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        kinds = self.capture.table.columns["kind"][rows]
        return {
            plan.PADDING: kinds == DRAFT_PADDING,
            plan.UNKNOWN_PREFIX: self.keys[rows] == 0,
            plan.FIRST_OF_PREFIX: np.isin(rows, self.alignment.parent),
            plan.ONLY_ONE: np.ones(len(rows), np.bool_),
        }

    def _between(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        columns = {name: column[rows] for name, column in self.capture.table.columns.items()}
        asked, computed, least, last = (known[columns["request"]] for known in self._counterparts())
        draft = is_draft(columns)
        runs_draft = bool((self.other.table.columns["kind"] > DRAFT_PADDING).any())
        return {
            plan.PADDING: columns["kind"] == DRAFT_PADDING,
            plan.UNKNOWN_PREFIX: self.keys[rows] == 0,
            plan.NOT_ASKED: ~asked,
            plan.PAST_DIFFERENCE: past_difference(self.capture, rows, self.first),
            plan.NO_DRAFT: draft & np.full(len(rows), not runs_draft),
            plan.MORE_OCCURRENCES: np.isin(self.keys[rows], self.other_keys),
            plan.NO_ROWS_OF_REQUEST: ~computed,
            plan.CACHED: ~draft & (columns["position"] < least),
            plan.ENDED: ~draft & (columns["position"] > last),
            plan.OTHER_PROPOSAL: draft,
            plan.NOT_TRIED: columns["kind"] == VERIFY_REJECTED,
            plan.NO_ROW: np.ones(len(rows), np.bool_),
        }

    def _counterparts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """For each request: is it in the other workload, has it rows there, and from where to where.

        Each [requests]. "From where" is the first position that the request computed: those before it came
        from the prefix cache.
        """
        columns, count = self.other.table.columns, len(self.other.requests)
        rows = np.flatnonzero(~is_draft(columns))
        lowest, highest = np.full(count, np.iinfo(np.int64).max), np.full(count, -1)
        np.minimum.at(lowest, columns["request"][rows], columns["position"][rows])
        np.maximum.at(highest, columns["request"][rows], columns["position"][rows])
        number = numbering()
        groups: dict[str | int, list[int]] = defaultdict(list)
        by_request = self.alignment.by == BY_REQUEST
        for index, (name, prompt) in enumerate(self.other.prompts.items()):
            groups[name if by_request else number(prompt)].append(index)
        total = len(self.capture.requests)
        asked, computed = np.zeros(total, np.bool_), np.zeros(total, np.bool_)
        least, last = np.zeros(total, np.int64), np.full(total, -1, np.int64)
        spans: dict[str | int, tuple[bool, int, int]] = {}
        for index, (name, prompt) in enumerate(self.capture.prompts.items()):
            key = name if by_request else number(prompt)
            if key not in groups:
                continue
            if key not in spans:
                same = np.array(groups[key])
                there = same[highest[same] >= 0]
                ends = (int(lowest[there].max()), int(highest[there].max())) if len(there) else (0, -1)
                spans[key] = (len(there) > 0, *ends)
            asked[index] = True
            computed[index], least[index], last[index] = spans[key]
        return asked, computed, least, last


def _example(capture: Capture, row: int) -> plan.ExampleRow:
    columns = capture.table.columns
    return plan.ExampleRow(
        request=capture.requests[columns["request"][row]],
        position=int(columns["position"][row]),
        kind=KINDS[columns["kind"][row]],
        step=int(columns["step"][row]),
        occurrence=int(columns["occurrence"][row]),
    )


def _kind_pairs(
    one: Capture, other: Capture, alignment: Alignment, differ: np.ndarray
) -> list[plan.KindPairs]:
    ours = one.table.columns["kind"][alignment.candidate]
    theirs = other.table.columns["kind"][alignment.parent]
    return [
        plan.KindPairs(candidate=KINDS[kind], parent=KINDS[with_kind], rows=rows, differ=different)
        for kind, with_kind, rows, different in _counted(ours, theirs, differ)
    ]


def _round_pairs(
    one: Capture, other: Capture, alignment: Alignment, differ: np.ndarray
) -> list[plan.RoundPairs]:
    sizes = _sizes(one), _sizes(other)
    ours, theirs = (
        np.repeat(np.arange(len(batches)), batches)[capture.table.columns["request"][rows]]
        for capture, batches, rows in zip(
            (one, other), sizes, (alignment.candidate, alignment.parent), strict=True
        )
    )
    return [
        plan.RoundPairs(
            candidate=number,
            parent=with_round,
            sizes=Both(candidate=sizes[0][number], parent=sizes[1][with_round]),
            rows=rows,
            differ=different,
        )
        for number, with_round, rows, different in _counted(ours, theirs, differ)
    ]


def _counted(ours: np.ndarray, theirs: np.ndarray, differ: np.ndarray) -> list[tuple[int, int, int, int]]:
    """How often each pair of values occurs and differs: (one, other, times, times that differ), ascending."""
    both = np.left_shift(ours.astype(np.int64), 32) + theirs
    values, group, counts = np.unique(both, return_inverse=True, return_counts=True)
    different = np.bincount(group[differ], minlength=len(values))
    return [
        (value >> 32, value & 0xFFFFFFFF, times, differing)
        for value, times, differing in zip(values.tolist(), counts.tolist(), different.tolist(), strict=True)
    ]


def _sizes(capture: Capture) -> list[int]:
    """Batch sizes of all rounds."""
    work = capture.open.workload
    return work.matrix * work.repeats


def _localize_plan(steps: Steps) -> plan.LocalizePlan:
    columns, first = steps.candidate.table.columns, []
    for pair, site in zip(steps.order.pairs[:FIRST_SHOWN], steps.order.site[:FIRST_SHOWN], strict=True):
        row = int(steps.alignment.candidate[pair])
        first.append(
            plan.PlannedPlace(
                request=steps.candidate.requests[columns["request"][row]],
                position=int(columns["position"][row]),
                kind=KINDS[columns["kind"][row]],
                step=int(columns["step"][row]),
                site=steps.alignment.sites[site],
            )
        )
    return plan.LocalizePlan(rows=len(steps.order.pairs), first=first)
