"""Signatures: what the places where differences enter have in common, and what the equal rows do not share.

For each request only the first differing row is a witness, since the rows behind it read what it wrote; rows
before it, and those of requests that never differ, are the rows that stayed equal. A pattern is named only if
every witness shows it and no equal row does, and only with at least two witnesses: one row shows too much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from localizer.diff.align import Alignment
from localizer.diff.compare import Comparison
from localizer.diff.details import Details
from localizer.diff.numerics import length
from localizer.diff.order import CausalOrder
from localizer.diff.places import OUTPUT, SAMPLER, Place, place
from localizer.diff.result import Signature
from localizer.store.expected import is_draft
from localizer.store.reader import Capture
from localizer.store.schema import DECODE, FEEDS_LOGITS, PREFILL, PREFILL_CHUNK, VERIFY_REJECTED

SIGNATURES = (
    *("draft-only", "sampler-only", "one-rank"),
    *("last-token", "from-position-1", "after-chunk-boundary", "cached-prefix"),
    *("decode-only", "prefill-only", "verify-only", "batch-size-over", "padded-batch", "heads", "grows"),
    "decays",
)
"""Codes, as docs/result.md explains them."""

FEWEST = 2
"""Witnesses that a pattern of rows needs."""

READ = 16
"""Witnesses of which payload is read, for the heads that differ."""

FACTOR = 4.0
"""By how much the relative error must change over the layers to be called growing or decaying."""


@dataclass(frozen=True)
class Evidence:
    """The rows that speak for or against a pattern, at the site of the first difference.

    Attributes:
        site: index among the alignment's sites.
        witnesses: pairs, the first differing one of each request whose first difference is at this site.
        equal: pairs that were compared there, are equal, and lie behind no difference of their request.
    """

    site: int
    witnesses: np.ndarray
    equal: np.ndarray


def signatures(
    candidate: Capture, alignment: Alignment, comparison: Comparison, order: CausalOrder, details: Details
) -> list[Signature]:
    """All patterns that hold, the most general first."""
    if not len(order.pairs):
        return []
    places = [place(name) for name in alignment.sites]
    found = list(_everywhere(places, comparison))
    found += _one_rank(candidate, places, alignment, comparison, order)
    evidence = gather(candidate, alignment, comparison, order)
    if evidence is not None:
        found += _patterns(candidate, alignment, evidence)
        found += _heads(alignment, evidence, details)
    return found + list(_course(alignment, comparison, order, places, details))


def _everywhere(places: list[Place], comparison: Comparison) -> Iterator[Signature]:
    """Differences that all lie at sites of one part."""
    sites = np.flatnonzero(comparison.differ_rows)
    rows = int(comparison.differ.any().sum())
    if all(places[site].draft for site in sites):
        yield Signature(code="draft-only", rows=rows)
    if all(places[site].stage == SAMPLER for site in sites):
        yield Signature(code="sampler-only", rows=rows)


def _one_rank(
    candidate: Capture, places: list[Place], alignment: Alignment, comparison: Comparison, order: CausalOrder
) -> Iterator[Signature]:
    """The one rank that differs in the first differing row of each request, where its difference enters.

    The witnesses are the rows of which that is where the causally first difference enters. The same sites of
    all other ranks, of either side, must have been compared there, and be equal.
    """
    if not alignment.owners:
        return
    owner = np.array([alignment.owners[name] for name in alignment.sites])
    first = places[int(order.site[0])]
    sites = np.array([i for i, where in enumerate(places) if where.group == first.group])
    _, where = np.unique(order.request, return_index=True)
    witnesses = order.pairs[where[np.isin(order.site[where], sites)]]
    differ, compared = comparison.differ[witnesses][:, sites], comparison.compared[witnesses][:, sites]
    ranks = np.unique(owner[sites[differ.any(axis=0)]])
    parts = {places[site].base for site in sites[differ.any(axis=0)]}
    others = np.array([owner[site] != ranks[0] and places[site].base in parts for site in sites])
    apart = {place(name).base for name in (*alignment.candidate_only, *alignment.parent_only)}
    held = [{owner[i] for i in sites if places[i].base == part} for part in parts]
    if any(len(of) < candidate.open.observer.ranks for of in held) or parts & apart:
        return
    if len(ranks) == 1 and others.any() and compared[:, others].all():
        yield Signature(code="one-rank", rows=len(witnesses), number=int(ranks[0]))


def gather(
    candidate: Capture, alignment: Alignment, comparison: Comparison, order: CausalOrder
) -> Evidence | None:
    """The evidence at the site of the causally first difference; None if that is a draft's."""
    site = int(order.site[0])
    if place(alignment.sites[site]).draft:
        return None
    _, first = np.unique(order.request, return_index=True)
    first = first[order.site[first] == site]
    witnesses = order.pairs[first]
    columns, rows = candidate.table.columns, alignment.candidate
    since = np.full(len(candidate.requests), np.iinfo(np.int64).max)
    differing = rows[order.pairs]
    np.minimum.at(since, columns["request"][differing], _when(columns, differing))
    before = _when(columns, rows) < since[columns["request"][rows]]
    equal = np.flatnonzero(comparison.compared[:, site] & ~comparison.differ.any() & before)
    equal = equal[~is_draft({"kind": columns["kind"][rows[equal]]})]
    return Evidence(site, witnesses, equal)


def _when(columns: Mapping[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """The causal order of rows of one request: by step, then position."""
    return (columns["step"][rows].astype(np.int64) << 32) + columns["position"][rows]


def _patterns(candidate: Capture, alignment: Alignment, evidence: Evidence) -> Iterator[Signature]:
    """Patterns of rows: all witnesses show them, no equal row does."""
    witnesses, equal = alignment.candidate[evidence.witnesses], alignment.candidate[evidence.equal]
    if len(witnesses) < FEWEST or not len(equal):
        return
    columns = candidate.table.columns
    kind, position, step = columns["kind"], columns["position"], columns["step"]
    began, start = _beginnings(candidate)
    request = columns["request"]
    prompt = (kind == PREFILL) | (kind == PREFILL_CHUNK)
    later = prompt & (step > began[request])
    shows = {
        "last-token": columns["logits"] >= FEEDS_LOGITS,
        "after-chunk-boundary": later,
        "cached-prefix": start[request] > 0,
        "decode-only": kind == DECODE,
        "prefill-only": prompt,
        "verify-only": (kind > DECODE) & (kind <= VERIFY_REJECTED),
        "padded-batch": _padded(candidate),
    }
    if (position[witnesses] == 1).all():
        shows["from-position-1"] = position >= 1
    for code in SIGNATURES:
        if code in shows and shows[code][witnesses].all() and not shows[code][equal].any():
            yield Signature(code=code, rows=len(witnesses), equal_rows=len(equal))
    sizes = _batch_sizes(candidate)
    largest = int(sizes[equal].max())
    if sizes[witnesses].min() > largest:
        yield Signature(code="batch-size-over", rows=len(witnesses), equal_rows=len(equal), number=largest)


def _beginnings(candidate: Capture) -> tuple[np.ndarray, np.ndarray]:
    """For each request the step of its first row, and the position of that row."""
    columns = candidate.table.columns
    target = ~is_draft(columns)
    began = np.full(len(candidate.requests), np.iinfo(np.int64).max)
    start = began.copy()
    np.minimum.at(began, columns["request"][target], columns["step"][target])
    np.minimum.at(start, columns["request"][target], columns["position"][target])
    return began, start


def _batch_sizes(candidate: Capture) -> np.ndarray:
    """For each row the number of requests in its step."""
    columns = candidate.table.columns
    if not len(columns["step"]):
        return np.zeros(0, np.int64)
    step = columns["step"].astype(np.int64)
    pairs = np.unique(step * len(candidate.requests) + columns["request"])
    sizes = np.bincount(pairs // len(candidate.requests), minlength=int(step.max()) + 1)
    return sizes[step]


def _padded(candidate: Capture) -> np.ndarray:
    """For each row whether its forward was padded; all False where the capture does not say."""
    steps = candidate.table.columns["step"]
    padded = {trace.step for trace in candidate.steps if trace.padded > sum(trace.scheduled)}
    return np.isin(steps, np.fromiter(padded, np.int64, len(padded)))


def _heads(alignment: Alignment, evidence: Evidence, details: Details) -> Iterator[Signature]:
    """The heads that differ, if they are the same few in every witness that was kept."""
    name, sets, total = alignment.sites[evidence.site], [], 0
    for pair in evidence.witnesses[:READ]:
        rows = details.rows(name, int(alignment.candidate[pair]), int(alignment.parent[pair]))
        if rows is None or rows[0].ndim != 2 or rows[0].shape != rows[1].shape:
            return
        total = len(rows[0])
        bits = [np.ascontiguousarray(row).view(np.uint8).reshape(total, -1) for row in rows]
        sets.append(tuple(np.flatnonzero((bits[0] != bits[1]).any(axis=1)).tolist()))
    if len(sets) >= FEWEST and len(set(sets)) == 1 and 0 < len(sets[0]) < total:
        yield Signature(code="heads", rows=len(sets), number=total, heads=list(sets[0]))


def _course(
    alignment: Alignment,
    comparison: Comparison,
    order: CausalOrder,
    places: list[Place],
    details: Details,
) -> Iterator[Signature]:
    """How the difference fares over the outputs of the layers behind it, on the row where it enters."""
    pair, first = int(order.pairs[0]), int(order.site[0])
    behind = [
        site
        for site in range(first, len(places))
        if places[site].stage == OUTPUT
        and places[site].draft == places[first].draft
        and alignment.owners.get(places[site].name) == alignment.owners.get(places[first].name)
        and comparison.compared[pair, site]
    ]
    if len(behind) < 3:
        return
    if not comparison.differ[pair, behind[-1]]:
        yield Signature(code="decays", rows=1, number=0)
        return
    errors = []
    for site in behind:
        rows = details.rows(
            alignment.sites[site], int(alignment.candidate[pair]), int(alignment.parent[pair])
        )
        if rows is None:
            return
        errors.append(_relative_error(*rows))
    known = [error for error in errors if error and np.isfinite(error)]
    if len(known) < 3 or len(known) < len([error for error in errors if error != 0]):
        return
    if known[-1] >= FACTOR * known[0]:
        yield Signature(code="grows", rows=1, number=round(known[-1] / known[0]))
    elif known[-1] * FACTOR <= known[0]:
        yield Signature(code="decays", rows=1, number=round(known[0] / known[-1]))


def _relative_error(candidate: np.ndarray, parent: np.ndarray) -> float:
    """The length of the difference of two rows in units of the parent's; NaN where that has none."""
    with np.errstate(all="ignore"):
        ours, theirs = candidate.astype(np.float64), parent.astype(np.float64)
        size = length(theirs)
        return length(ours - theirs) / size if size else np.nan
