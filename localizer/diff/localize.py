"""Where the first difference enters, in causal order: step, draft step, request, position, execution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from localizer.diff import numerics
from localizer.diff.align import WITHIN, Alignment, split_otherwise
from localizer.diff.compare import Comparison
from localizer.diff.details import Details
from localizer.diff.drafts import Feeding
from localizer.diff.keyvalue import key_value_rows
from localizer.diff.order import causal_order
from localizer.diff.places import (
    ATTENTION,
    EXPERTS,
    FINAL,
    INPUTS,
    INSIDE,
    LM_HEAD,
    MODULE,
    OUTPUT,
    QKV,
    ROUTING,
    SAMPLER,
    STATE_SPACE,
    Place,
    key_value_sites,
    place,
    taken_in,
    upstream,
)
from localizer.diff.result import (
    CANDIDATE,
    PARENT,
    Amplifier,
    Both,
    Cause,
    Finding,
    FirstAt,
    KeyValueRows,
    RequestFirst,
    RowDifference,
    Segment,
    Signature,
    SiteResult,
    Unobserved,
)
from localizer.diff.signature import signatures
from localizer.diff.within import key_value_within
from localizer.store.reader import Capture
from localizer.store.schema import KINDS
from localizer.wire.spec import LOGITS

BLAMES = (
    *("inputs", "code-between", "attention", "final", "lm-head", "sampler", "unobserved"),
    *("auxiliary", "draft-entry", "experts", "router", "state-space"),
)
"""What a segment holds. "unobserved": nothing upstream was compared on the row; "auxiliary": anything up to
an unknown place inside the forward; "draft-entry": what takes the draft's inputs in, and what was fed it."""

WRONG_INPUTS, CODE_BETWEEN, IN_ATTENTION, IN_FINAL, IN_LM_HEAD, IN_SAMPLER, NOTHING_UPSTREAM = BLAMES[:7]
IN_AUXILIARY, DRAFT_ENTRY, IN_EXPERTS, IN_ROUTER, IN_STATE_SPACE = BLAMES[7:]

DETAILED_REQUESTS = 256
"""Requests whose own first difference is described from its payload, with what its segment holds."""

MOST_BARS = 1000
"""Places of first differences that the histogram lists."""

READ_POSITIONS = 1 << 20
"""Earlier positions that are looked at for attention outputs, of all findings together."""

READ_ROWS = 8
"""Differing rows read per site, the causally first, for the site's worst class."""

JUDGED_ROWS = 256
"""The same where a tolerance was given for the site."""

FIRST_ROWS = 32
"""Differing rows of the first finding's site that are read and told one by one, the causally first."""

SCANNED_LOGITS = 512
"""Differing logits rows searched for the first argmax flip."""


class Localizer:
    """Turns differing pairs into findings.

    Attributes:
        order: the differing pairs.
    """

    def __init__(
        self,
        candidate: Capture,
        parent: Capture,
        alignment: Alignment,
        comparison: Comparison,
        details: Details,
    ) -> None:
        self._candidate, self._parent = candidate, parent
        self._alignment, self._comparison = alignment, comparison
        self._details = details
        self._places = [place(name) for name in alignment.sites]
        self.order = causal_order(candidate, alignment, comparison.differ)
        self._feeding = Feeding(candidate, parent, alignment)
        self._positions = 0
        self._all_layers = all(
            capture.open.observer.layers == "all" and not (capture.manifest and capture.manifest.untapped)
            for capture in (candidate, parent)
        )
        self._split = [place(base) for base in split_otherwise(alignment)]
        self._skipped = {
            name
            for capture in (candidate, parent)
            if capture.manifest is not None
            for name in capture.manifest.not_applicable
        }

    def first(self) -> Finding | None:
        """The causally first difference."""
        return self._finding(0) if len(self.order.pairs) else None

    def first_of_target(self) -> Cause | None:
        """The causally first difference in a row of the target, if the first of all is a draft's."""
        draft = np.array([where.draft for where in self._places], np.bool_)[self.order.site]
        where = np.flatnonzero(~draft)
        if not len(where) or where[0] == 0:
            return None
        pair, site = int(self.order.pairs[where[0]]), int(self.order.site[where[0]])
        request, position, step = self._row(int(self._alignment.candidate[pair]))
        return Cause(request=request, position=position, step=step, site=self._places[site].name)

    def requests(self) -> list[RequestFirst]:
        """The first difference of each request, in causal order."""
        _, where = np.unique(self.order.request, return_index=True)
        findings = [
            self._finding(int(index), detailed=number < DETAILED_REQUESTS)
            for number, index in enumerate(np.sort(where))
        ]
        return [RequestFirst(request=finding.request, first=finding) for finding in findings]

    def histogram(self) -> list[FirstAt]:
        """How many requests differ first at each site and position, the most frequent first."""
        _, where = np.unique(self.order.request, return_index=True)
        rows = self._alignment.candidate[self.order.pairs[where]]
        positions = self._candidate.table.columns["position"][rows].tolist()
        counts = Counter(zip(self.order.site[where].tolist(), positions, strict=True))
        return [
            FirstAt(
                site=self._places[site].name,
                layer=self._places[site].number,
                position=position,
                requests=requests,
            )
            for (site, position), requests in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        ][:MOST_BARS]

    def signatures(self) -> list[Signature]:
        """What the places where differences enter have in common."""
        return signatures(self._candidate, self._alignment, self._comparison, self.order, self._details)

    def amplifier(self) -> Amplifier | None:
        """The target's first row whose argmax flips; None if none of those read does, or without payload."""
        if LOGITS not in self._alignment.sites or not self._details.stored(LOGITS):
            return None
        site = self._alignment.sites.index(LOGITS)
        differing = self.order.pairs[self._comparison.differ[self.order.pairs, site]]
        for pair in differing[:SCANNED_LOGITS]:
            row, other = int(self._alignment.candidate[pair]), int(self._alignment.parent[pair])
            found = self._details.logits(row, other)
            if found is not None and found.argmax_flip:
                request, position, step = self._row(row)
                return Amplifier(request=request, position=position, step=step, logits=found)
        return None

    def sites(self) -> list[SiteResult]:
        """Every shared site on all paired rows: the target's, which end with its token, then the draft's."""
        compared, differ = self._comparison.compared_rows, self._comparison.differ_rows
        results = []
        for index, name in enumerate(self._alignment.sites):
            judged = bool(self._details.criteria(name))
            read = self._read(index, JUDGED_ROWS if judged else READ_ROWS) if differ[index] else []
            kind, ulp = numerics.worst(read)
            within = sum(detail.within_tolerance is True for detail in read)
            results.append(
                SiteResult(
                    name=name,
                    rows_compared=int(compared[index]),
                    rows_differ=int(differ[index]),
                    missing=Both(
                        candidate=int(self._comparison.missing_candidate[index]),
                        parent=int(self._comparison.missing_parent[index]),
                    ),
                    class_=kind,
                    max_ulp=ulp,
                    rows_read=sum(detail.class_ is not None for detail in read),
                    rows_within_tolerance=within if judged else None,
                    within_tolerance=all_within(read, int(differ[index])),
                )
            )
        return [item for draft in (False, True) for item in results if place(item.name).draft == draft]

    def first_rows(self) -> list[RowDifference]:
        """Differing rows of the first finding's site, in causal order: those whose payload was read."""
        if not len(self.order.pairs):
            return []
        site = int(self.order.site[0])
        rows = []
        for pair, detail in zip(self._differing(site, FIRST_ROWS), self._read(site, FIRST_ROWS), strict=True):
            row = int(self._alignment.candidate[pair])
            if detail.class_ is None:
                continue
            request, position, _ = self._row(row)
            rows.append(
                RowDifference(
                    request=request,
                    position=position,
                    kind=KINDS[self._candidate.table.columns["kind"][row]],
                    class_=detail.class_,
                    elements_differ=detail.elements_differ,
                    max_ulp=detail.max_ulp,
                    max_abs=detail.max_abs,
                    cosine=detail.cosine,
                    within_tolerance=detail.within_tolerance,
                )
            )
        return rows

    def _differing(self, site: int, limit: int) -> np.ndarray:
        """int64: the causally first pairs that differ at a site."""
        return self.order.pairs[self._comparison.differ[self.order.pairs, site]][:limit]

    def _read(self, site: int, limit: int) -> list[numerics.Detail]:
        """How the causally first differing rows of a site differ."""
        name = self._alignment.sites[site]
        return [
            self._details.of(name, int(self._alignment.candidate[pair]), int(self._alignment.parent[pair]))
            for pair in self._differing(site, limit)
        ]

    def _code_of(self, after: str | None, before: str) -> dict[str, str | None]:
        """Where the two ends of a segment are in the source of the candidate, or else of the parent."""
        for side, capture in ((CANDIDATE, self._candidate), (PARENT, self._parent)):
            code = capture.manifest.code if capture.manifest is not None else {}
            if before in code:
                return {
                    "after_code": None if after is None else code.get(after),
                    "before_code": code[before],
                    "code_of": side,
                }
        return {}

    def _row(self, row: int) -> tuple[str, int, int]:
        columns = self._candidate.table.columns
        request = self._candidate.requests[columns["request"][row]]
        return request, int(columns["position"][row]), int(columns["step"][row])

    def _finding(self, number: int, *, detailed: bool = True) -> Finding:
        pair, site = int(self.order.pairs[number]), int(self.order.site[number])
        row, other = int(self._alignment.candidate[pair]), int(self._alignment.parent[pair])
        compared = self._comparison.compared[pair].tolist()
        after = upstream(self._places, site, compared, self._alignment.owners)
        before = self._places[site]
        start = None if after is None else self._places[after]
        blame = blame_of(start, before)
        request, position, step = self._row(row)
        name = before.name
        detail = self._details.of(name, row, other) if detailed else numerics.Detail()
        theirs = self._parent.table.columns
        return Finding(
            request=request,
            position=position,
            kind=KINDS[self._candidate.table.columns["kind"][row]],
            step=step,
            site=name,
            segment=Segment(
                after=None if start is None else start.name,
                before=name,
                **self._code_of(None if start is None else start.name, name),
            ),
            blame=blame,
            class_=detail.class_,
            elements_differ=detail.elements_differ,
            elements=detail.elements,
            first_element=detail.first_element,
            max_ulp=detail.max_ulp,
            max_abs=detail.max_abs,
            max_rel=detail.max_rel,
            cosine=detail.cosine,
            values=detail.values,
            logits=self._details.logits(row, other, name) if detailed and before.stage == LM_HEAD else None,
            key_value=self._key_value(pair, before, position)
            if detailed
            and before.stage == OUTPUT
            and key_value_sites(before, self._alignment.sites, self._alignment.owners)
            else None,
            fed_by=self._feeding.of(row, other)
            if detailed
            and before.draft
            and before.stage != INPUTS
            and (start is None or start.stage == INPUTS)
            else None,
            unobserved=self._unobserved(after, site, compared) if detailed else Unobserved(),
            heads=detail.heads,
            heads_differ=detail.heads_differ,
            heads_compared=detail.heads_compared,
            within_tolerance=detail.within_tolerance,
            parent_request=self._parent.requests[theirs["request"][other]],
            parent_step=int(theirs["step"][other]),
        )

    def _key_value(self, pair: int, output: Place, position: int) -> KeyValueRows:
        """What an attention output read, as long as that is not too much in all."""
        self._positions += position
        if self._positions > READ_POSITIONS:
            return KeyValueRows(positions=position, equal=0, differ=0, not_compared=position)
        if self._alignment.by == WITHIN:
            rows = int(self._alignment.candidate[pair]), int(self._alignment.parent[pair])
            return key_value_within(self._candidate, *rows, output)
        return key_value_rows(self._candidate, self._alignment, self._comparison, pair, output)

    def _unobserved(self, after: int | None, site: int, compared: Sequence[bool]) -> Unobserved:
        """What lies inside the segment that ends at `site` without having been compared on the row."""
        before = self._places[site]
        start = None if after is None else self._places[after]
        inside = [] if after is None else [i for i in range(after + 1, site) if not compared[i]]
        mine = before.draft
        inside = [i for i in inside if self._places[i].draft == mine and self._places[i].stage != INSIDE]
        sites = [self._places[i].name for i in inside if self._places[i].group != before.group]
        if before.stage == OUTPUT:
            there = {self._places[i].name for i in range(site) if compared[i]}
            parts = taken_in(before, self._alignment.sites, self._alignment.owners)
            sites += [name for name in parts if name not in there and name not in sites]
        sites = [name for name in sites if name not in self._skipped]
        low = None if start is None else self._before_first(mine) if start.stage == INPUTS else start.number
        layers = list(range(low + 1, before.number)) if low is not None and before.number is not None else []
        if start is not None and before.stage in (FINAL, LM_HEAD, SAMPLER):
            beside = [*(self._places[i] for i in inside), *(it for it in self._split if it.draft == mine)]
            numbers = {it.number for it in beside if it.number is not None}
            layers = sorted(number for number in numbers if low is None or number > low)
        later = (
            not self._all_layers
            and start is not None
            and start.stage in (INPUTS, QKV, ROUTING, OUTPUT, MODULE)
            and not mine
        )
        return Unobserved(layers=layers, sites=sites, later_layers=later and not before.layer)

    def _before_first(self, draft: bool) -> int:
        """The number before that of the first layer; a draft's, all tapped, may go on from the target's."""
        numbers = (where.number for where in self._places if draft and where.draft)
        return min((number for number in numbers if number is not None), default=0) - 1


def all_within(read: Sequence[numerics.Detail], differ: int) -> bool | None:
    """Whether all `differ` differing rows of a site are within tolerance, as far as those read can tell."""
    judged = [detail.within_tolerance for detail in read]
    if False in judged:
        return False
    return True if differ and judged.count(True) == differ else None


def blame_of(after: Place | None, before: Place) -> str:
    """What the segment between two sites holds, as one of `BLAMES`."""
    if before.stage == INPUTS:
        return WRONG_INPUTS
    if after is None:
        return NOTHING_UPSTREAM
    if before.stage == INSIDE:
        return IN_AUXILIARY
    if before.draft and after.stage == INPUTS:
        return DRAFT_ENTRY
    if after.layer == before.layer and after.op:
        if before.stage == OUTPUT:
            return {ATTENTION: IN_ATTENTION, EXPERTS: IN_EXPERTS, STATE_SPACE: IN_STATE_SPACE}[after.op]
        if before.stage == ROUTING:
            return IN_ROUTER
    whole = {(FINAL, OUTPUT): IN_FINAL, (LM_HEAD, FINAL): IN_LM_HEAD, (SAMPLER, LM_HEAD): IN_SAMPLER}
    return whole.get((before.stage, after.stage), CODE_BETWEEN)
