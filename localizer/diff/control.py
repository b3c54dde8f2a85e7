"""Is the first difference also one between two runs of the parent? The change or the noise, place by place.

A place is a row of the parent and a site. A control shows something there only if it is a second sample of
what the parent did: a complete run of the same source, workload and settings on the same kind of machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from localizer.diff import verdict
from localizer.diff.align import Alignment, align, workloads_equal
from localizer.diff.attribution import (
    ALSO_IN_CONTROL,
    ANOTHER_SOURCE,
    ANOTHER_WORKLOAD,
    CANDIDATE_ONLY,
    DIFFERS,
    EQUAL,
    INCOMPLETE_CONTROL,
    NO_CONTROL,
    NO_PLACE,
    NO_ROW,
    NO_SITE,
    NOT_EXAMINED,
    NOT_RECORDED,
    OTHER_MACHINE,
    OTHER_SETTINGS,
    OTHER_TOKENS,
    UPSTREAM,
    ControlFacts,
    ControlPlace,
    Controls,
    RequestAttribution,
    SiteControl,
    Unfit,
)
from localizer.diff.compare import CHUNK_BYTES, Comparison, compare
from localizer.diff.drafts import FIRST_STEP
from localizer.diff.keyvalue import chain
from localizer.diff.localize import DETAILED_REQUESTS
from localizer.diff.order import CausalOrder, causal_order
from localizer.diff.places import ATTENTION, FINAL, INPUTS, INSIDE, LM_HEAD, SAMPLER, Place, place, same_heads
from localizer.diff.settings import settings
from localizer.diff.speculation import speculation
from localizer.diff.tokens import TokenComparison, compare_tokens
from localizer.diff.unpaired import past_difference
from localizer.errors import LocalizerError
from localizer.store.expected import is_draft
from localizer.store.reader import Capture
from localizer.store.schema import VERIFY_REJECTED, Identity

CONDITIONS = {
    ANOTHER_SOURCE: ("source.", "overlay.", "identity.native", "identity.python", "identity.checkout"),
    ANOTHER_WORKLOAD: ("workload.max_tokens", "sampling."),
    OTHER_SETTINGS: ("engine.", "environment.", "draft.", "intervention.", "loaded weights"),
    OTHER_MACHINE: ("host.", "identity.processor", "identity.gpus"),
}
"""Beginnings of the names of settings that a control must share with the parent, and what it is if not."""

FREE = ("source.python", "source.vllm_location", "host.name")
"""Settings among these that say where something lies, not what it is."""


@dataclass(frozen=True)
class Examined:
    """Candidate and parent as far as they are compared: what is to be attributed."""

    comparable: bool
    candidate: Capture
    parent: Capture
    alignment: Alignment
    comparison: Comparison
    order: CausalOrder
    parity: TokenComparison


def check_controls(candidate: Capture, parent: Capture, controls: Sequence[Capture]) -> None:
    """Check that every control is a capture of its own, and of the parent's model.

    Raises:
        LocalizerError: one is not.
    """
    known = [("the candidate", candidate), ("the parent", parent)]
    for control in controls:
        for what, other in known:
            if same(control, other):
                raise LocalizerError(
                    f"{control.folder} is {what} itself, which says nothing about noise; "
                    "capture the parent's source once more and name that capture as the control."
                )
        if verdict.different_models(control, parent):
            raise LocalizerError(
                f"{control.folder} ran another model than the parent, so it is no control; "
                "capture the parent's source once more with the parent's model."
            )
        known.append(("another control", control))


def _lies_before(where: Place, there: Place) -> bool:
    """Whether a site that comes earlier in execution order is known to lie upstream of another on its row.

    Auxiliary hidden states are computed between layers that are not known: before the end of the forward, and
    behind its inputs. Attention computes each head from its own query, key and value.
    """
    if where.draft != there.draft or where.group == there.group:
        return False
    if where.layer == there.layer and where.op == ATTENTION and not same_heads(where, there):
        return False
    if INSIDE in (where.stage, there.stage):
        return where.stage == INPUTS or there.stage in (FINAL, LM_HEAD, SAMPLER)
    return True


def same(one: Capture, other: Capture) -> bool:
    """Whether two are one capture, or copies of one; phases of one are not."""
    if one.phase != other.phase:
        return False
    if one.folder.resolve() == other.folder.resolve():
        return True
    return one.open == other.open and one.manifest == other.manifest


def unfit(control: Capture, parent: Capture) -> list[Unfit]:
    """Why a control is no second sample of the parent's run; empty where it is one."""
    found = []
    if not control.complete:
        texts = control.reasons or ["its records do not say why"]
        found += [Unfit(code=INCOMPLETE_CONTROL, detail=text) for text in texts]
    if not workloads_equal(control, parent):
        found.append(Unfit(code=ANOTHER_WORKLOAD))
    different = list(_different(control, parent))
    for code, beginnings in CONDITIONS.items():
        other = (item for item in different if item[0].startswith(beginnings))
        for name, ours, theirs in islice(other, 1):
            found.append(Unfit(code=code, detail=name, control=ours, parent=theirs))
    return found


def _different(control: Capture, parent: Capture) -> Iterator[tuple[str, Any, Any]]:
    """Settings that control and parent do not share, then what really ran where both know it."""
    ours, theirs = settings(control), settings(parent)
    for name in (*theirs, *(name for name in ours if name not in theirs)):
        if name not in FREE and ours.get(name) != theirs.get(name):
            yield name, ours.get(name), theirs.get(name)
    one, other = control.manifest, parent.manifest
    if one is None or other is None:
        return
    loaded = [it.weights for it in (one, other) if it.weights is not None]
    if len({it.algorithm for it in loaded}) == 1 and len({it.digest for it in loaded}) == 2:
        yield "loaded weights", loaded[0].digest, loaded[1].digest
    if one.identity is not None and other.identity is not None:
        here, there = ran(one.identity), ran(other.identity)
        yield from ((name, it, there[name]) for name, it in here.items() if it != there.get(name, it))


def ran(identity: Identity) -> dict[str, Any]:
    """What runs of a source share of what really ran, by name; one that only one run has does not matter.

    Which files a process loads may depend on the state of its caches, so the digest over all Python files is
    compared only between as many.
    """
    python, checkout = identity.python, identity.checkout
    found: dict[str, Any] = {f"identity.native.{name}": it for name, it in identity.native.items() if it}
    found["identity.python.changed"] = sorted(python.changed)
    found[f"identity.python of {python.files} files"] = python.digest
    if checkout is not None:
        found["identity.checkout"] = checkout.commit
    if identity.processor is not None:
        found["identity.processor"] = msgspec.to_builtins(identity.processor)
    found["identity.gpus"] = sorted((gpu.name, gpu.driver) for gpu in identity.gpus)
    return found


class Control:
    """One control beside the parent, whose rows and steps name all places.

    Attributes:
        unfit: why it attributes nothing.
    """

    def __init__(self, control: Capture, parent: Capture) -> None:
        self._control, self._parent = control, parent
        self.unfit = unfit(control, parent)
        equal = workloads_equal(parent, control)
        self._alignment = align(parent, control)
        self._comparison = compare(parent, control, self._alignment)
        self._parity = compare_tokens(parent, control, equal_workloads=equal)
        self._requests = {request.candidate: request for request in self._parity.requests}
        self._first = {request: it.first for request, it in self._requests.items()}
        self._pair = np.full(len(parent.table), -1, np.int64)
        self._pair[self._alignment.candidate] = np.arange(len(self._alignment))
        self._site = {name: index for index, name in enumerate(self._alignment.sites)}
        self._places = [place(name) for name in self._alignment.sites]

    def facts(self, at_first: str, upstream: ControlPlace | None) -> ControlFacts:
        """The summary, with what the control shows at the first difference of candidate and parent."""
        capture, tokens = self._control, self._parity.tokens
        order = causal_order(self._parent, self._alignment, self._comparison.differ)
        first = None
        if len(order.pairs):
            first = self._where(int(order.pairs[0]), int(order.site[0]))
        compared, differing = (
            int(rows.sum()) for rows in (self._comparison.compared_rows, self._comparison.differ_rows)
        )
        drafted = speculation(self._parent, capture, self._alignment)
        missing = self._comparison.missing_candidate.sum() + self._comparison.missing_parent.sum()
        different = differing or tokens.positions_differ or (drafted is not None and drafted.proposals.differ)
        complete = self._parent.complete and capture.complete and compared and not missing
        return ControlFacts(
            label=capture.label,
            path=capture.shown,
            created=capture.open.created,
            vllm=capture.open.source.vllm,
            state=capture.state,
            unfit=self.unfit,
            verdict=verdict.DIVERGED
            if different
            else verdict.IDENTICAL
            if complete
            else verdict.INCONCLUSIVE,
            rows=len(self._alignment),
            compared=compared,
            differ=differing,
            requests=tokens.requests,
            requests_differ=tokens.requests_differ,
            positions=tokens.positions,
            positions_differ=tokens.positions_differ,
            first=first,
            at_first=at_first,
            upstream=upstream,
        )

    def _where(self, pair: int, site: int) -> ControlPlace:
        row, columns = int(self._alignment.candidate[pair]), self._parent.table.columns
        return ControlPlace(
            request=self._parent.requests[columns["request"][row]],
            position=int(columns["position"][row]),
            step=int(columns["step"][row]),
            site=self._alignment.sites[site],
        )

    def at(self, row: int, name: str, before: np.ndarray) -> tuple[str, ControlPlace | None]:
        """What the control shows at a place, and where it differs upstream.

        Args:
            row: of the parent.
            name: of the site.
            before: rows of the parent that lie upstream of `row`, in the order computed.
        """
        pair, site = int(self._pair[row]), self._site.get(name)
        recorded = False
        if pair >= 0 and site is not None:
            recorded = bool(self._comparison.compared[pair, site])
            if self._comparison.differ[pair, site]:
                return DIFFERS, None
        if pair < 0 and past_difference(self._parent, np.array([row]), self._first)[0]:
            return OTHER_TOKENS, None
        upstream = self._upstream(row, name, before)
        if upstream is not None:
            return UPSTREAM, upstream
        if recorded:
            return EQUAL, None
        return NO_SITE if site is None else NO_ROW if pair < 0 else NOT_RECORDED, None

    def _upstream(self, row: int, name: str, before: np.ndarray) -> ControlPlace | None:
        """The first of the sites upstream of a place at which the control differs."""
        pairs = self._pair[before]
        pairs = pairs[pairs >= 0]
        differing = np.flatnonzero(self._comparison.differ[pairs].any(axis=1))
        if len(differing):
            pair = int(pairs[differing[0]])
            return self._where(pair, int(self._comparison.differ[pair].argmax()))
        pair, there = int(self._pair[row]), place(name)
        if pair < 0:
            return None
        order = [site.name for site in self._parent.sites]
        for site in np.flatnonzero(self._comparison.differ[pair]):
            where = self._places[site]
            if order.index(where.name) < order.index(name) and _lies_before(where, there):
                return self._where(pair, int(site))
        return None

    def at_token(self, request: str, output_index: int) -> str:
        """What the control shows at a token that the parent returned."""
        found = self._requests.get(request)
        if found is None or (found.first is None and not (found.finished or found.positions > output_index)):
            return NO_ROW
        if found.first is None or found.first > output_index:
            return EQUAL
        return DIFFERS if found.first == output_index else OTHER_TOKENS

    def over(self, rows: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Bool [rows, sites] each: whether rows of the parent were compared at sites, and differ."""
        pairs = self._pair[rows]
        sites = np.array([self._site.get(name, -1) for name in names], np.int64)
        if 0 in self._comparison.compared.shape:
            nothing = np.zeros((len(rows), len(names)), np.bool_)
            return nothing, nothing
        there = (pairs >= 0)[:, None] & (sites >= 0)
        compared, differ = (  # -1 takes what `there` then leaves out
            bits[pairs][:, sites] & there for bits in (self._comparison.compared, self._comparison.differ)
        )
        return compared, differ


def attribute(examined: Examined, captures: Sequence[Capture]) -> tuple[str, Controls | None]:
    """Whether the first difference is the candidate's alone, with all that the controls say; None without."""
    if not captures:
        return NO_CONTROL, None
    controls = [Control(capture, examined.parent) for capture in captures]
    order, rows = examined.order, examined.alignment.parent
    _, starts = np.unique(order.request, return_index=True)
    requests: list[RequestAttribution] = []
    at_first: list[Shown] = [(NO_PLACE, None) for _ in controls]
    for number, index in enumerate(np.sort(starts).tolist()):
        pair, site = int(order.pairs[index]), int(order.site[index])
        row, name = int(rows[pair]), examined.alignment.sites[site]
        shown: list[Shown] = [(NOT_EXAMINED, None) for _ in controls]
        if number < DETAILED_REQUESTS:
            before = upstream_rows(examined.parent, row)
            shown = [control.at(row, name, before) for control in controls]
        if not number:
            at_first = shown
        request = examined.candidate.requests[order.request[index]]
        requests.append(RequestAttribution(request=request, attribution=_decide(controls, shown)))
    token = examined.parity.first
    if examined.comparable and not requests and token is not None and token.first is not None:
        at_first = [(control.at_token(token.parent, token.first), None) for control in controls]
    return _decide(controls, at_first), Controls(
        captures=[control.facts(*shown) for control, shown in zip(controls, at_first, strict=True)],
        requests=requests,
        sites=_sites(examined, [control for control in controls if not control.unfit]),
    )


Shown = tuple[str, ControlPlace | None]
"""What a control shows at a place, and where it differs upstream."""


def _decide(controls: Iterable[Control], shown: Iterable[Shown]) -> str:
    """One control that differs is enough for noise; without one, one that is equal speaks for the change."""
    found = {code for control, (code, _) in zip(controls, shown, strict=True) if not control.unfit}
    if found & {DIFFERS, UPSTREAM, OTHER_TOKENS}:
        return ALSO_IN_CONTROL
    return CANDIDATE_ONLY if EQUAL in found else NO_CONTROL


def upstream_rows(parent: Capture, row: int) -> np.ndarray:
    """The rows whose results a row was computed from, in the order computed; int64.

    For the target these are the rows of its own request, and for positions that it did not compute (a hit in
    the prefix cache) those of equal prefix. For a draft they are the target's rows of its own request, the
    draft's of the same step, and of earlier steps those of draft step 1, which writes over what others left.
    """
    columns = parent.table.columns
    position = columns["position"][row]
    earlier = {name: column[:row] for name, column in columns.items()}
    own = earlier["request"] == columns["request"][row]
    taken = (earlier["kind"] != VERIFY_REJECTED) | (earlier["step"] == columns["step"][row])
    if is_draft({"kind": columns["kind"][row : row + 1]})[0]:
        taken &= (earlier["step"] == columns["step"][row]) | (earlier["kind"] <= FIRST_STEP)
        return np.flatnonzero(own & taken & (earlier["position"] <= position))
    before = ~is_draft(earlier) & (earlier["position"] < position)
    prefixes = chain(parent, row)
    if prefixes is None:
        return np.flatnonzero(own & taken & before)
    rows = _along(parent, np.flatnonzero(own & before), prefixes)
    cached = np.ones(position, np.bool_)
    cached[columns["position"][rows]] = False
    if not cached.any():
        return rows
    foreign = _along(parent, np.flatnonzero(~own & before), prefixes)
    return np.sort(np.r_[rows, foreign[cached[columns["position"][foreign]]]])


def _along(parent: Capture, rows: np.ndarray, prefixes: np.ndarray) -> np.ndarray:
    """Those of the rows whose prefix is that of their position in a text."""
    positions = parent.table.columns["position"][rows]
    return rows[(parent.table.prefix[rows] == prefixes[positions]).all(axis=1)]


def _sites(examined: Examined, controls: Sequence[Control]) -> list[SiteControl]:
    """Where candidate or controls differ from the parent, site by site."""
    names, comparison = examined.alignment.sites, examined.comparison
    totals = {
        what: np.zeros(len(names), np.int64)
        for what in ("candidate_only", "both", "control_only", "not_covered")
    }
    step = max(1, CHUNK_BYTES // max(1, len(names)))
    for start in range(0, len(examined.alignment), step):
        part = slice(start, start + step)
        ours, theirs = comparison.compared[part], comparison.differ[part]
        covered, noisy = (np.zeros(ours.shape, np.bool_) for _ in range(2))
        for control in controls:
            compared, differ = control.over(examined.alignment.parent[part], names)
            covered |= compared
            noisy |= differ
        totals["candidate_only"] += (theirs & covered & ~noisy).sum(axis=0)
        totals["both"] += (theirs & noisy).sum(axis=0)
        totals["control_only"] += (ours & ~theirs & noisy).sum(axis=0)
        totals["not_covered"] += (theirs & ~covered).sum(axis=0)
    return [
        SiteControl(site=name, **{what: int(total[index]) for what, total in totals.items()})
        for index, name in enumerate(names)
        if any(total[index] for total in totals.values())
    ]
