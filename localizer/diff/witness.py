"""The witness: which rows lead to the first difference, and did they come again?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from localizer.diff.align import Alignment, align, comparable
from localizer.diff.compare import compare
from localizer.diff.result import Result
from localizer.diff.runs import Reproduction, Way
from localizer.store.reader import Capture
from localizer.store.schema import KINDS

TOKEN, SITE = "token", "site"


def ways(found: Result) -> list[Way]:
    """What is to be captured again; nothing where nothing differs.

    It leads to the first token that differs, which the row before it decides, and to the first differing row.
    """
    chosen = []
    token, first = found.tokens.first, found.first
    if token is not None:
        chosen.append(Way(request=token.request, position=token.position - 1, why=TOKEN))
    if first is not None and not any(
        (way.request == first.request and way.position >= first.position) for way in chosen
    ):
        chosen.append(Way(request=first.request, position=first.position, why=SITE))
    return chosen


def reproduction(again: Capture, before: Capture, chosen: Sequence[Way]) -> Reproduction:
    """Compare, by digest, the rows on the ways with those of the first pass, at all shared sites."""
    alignment = align(again, before)
    wanted = np.unique(np.concatenate([_rows(before, way) for way in chosen]))
    pairs = np.flatnonzero(np.isin(alignment.parent, wanted))
    part = replace(alignment, candidate=alignment.candidate[pairs], parent=alignment.parent[pairs])
    found = compare(again, before, part)
    request, position, site = _first(again, part, found.differ[np.arange(len(part))])
    return Reproduction(
        capture=again.label,
        rows=len(wanted),
        rows_missing=len(wanted) - len(pairs),
        compared=int(found.compared_rows.sum()),
        differ=int(found.differ_rows.sum()),
        missing=_missing(again, before, part),
        tokens_equal=all(_tokens(again, way) == _tokens(before, way) for way in chosen),
        state=again.state,
        first_site=site,
        first_request=request,
        first_position=position,
    )


def _tokens(capture: Capture, way: Way) -> list[int]:
    """The tokens that the rows of a way decide."""
    decided = max(0, way.position + 2 - len(capture.prompts[way.request]))
    return capture.outputs.get(way.request, [])[:decided]


def _rows(capture: Capture, way: Way) -> np.ndarray:
    """The rows of a way, the draft's too, but for those that a draft computed for rejected tokens."""
    columns = capture.table.columns
    mine = columns["request"] == capture.requests.index(way.request)
    return np.flatnonzero(mine & (columns["position"] <= way.position) & comparable(capture.table))


def _missing(again: Capture, before: Capture, part: Alignment) -> int:
    """Pairs that the first pass recorded, at sites that both have, and the witness did not."""
    ours = again.table.present[part.candidate][:, part.candidate_sites]
    theirs = before.table.present[part.parent][:, part.parent_sites]
    return int((theirs & ~ours).sum())


def shows(candidate: Capture, parent: Capture, found: Result, first_pass: Result) -> bool:
    """Whether two witness captures differ where those of the first pass first did.

    They may differ further up as well, at sites or rows that the first pass did not record.

    Args:
        candidate: its witness capture.
        parent: likewise.
        found: their diff.
        first_pass: the diff of the first pass.
    """
    first = first_pass.first
    if first is None:
        return found.tokens.first == first_pass.tokens.first
    alignment, columns = align(candidate, parent), candidate.table.columns
    if first.site not in alignment.sites:
        return False
    here = columns["request"] == candidate.requests.index(first.request)
    here &= (columns["position"] == first.position) & (columns["kind"] == KINDS.index(first.kind))
    pairs = np.flatnonzero(here[alignment.candidate])
    part = replace(alignment, candidate=alignment.candidate[pairs], parent=alignment.parent[pairs])
    differ = compare(candidate, parent, part).differ
    return bool(differ[np.arange(len(part))][:, alignment.sites.index(first.site)].any())


def _first(
    capture: Capture, part: Alignment, differ: np.ndarray
) -> tuple[str | None, int | None, str | None]:
    """Request, position and site of the first pair that differs."""
    rows, sites = np.nonzero(differ)
    if not len(rows):
        return None, None, None
    columns, row = capture.table.columns, part.candidate[rows[0]]
    return capture.requests[columns["request"][row]], int(columns["position"][row]), part.sites[sites[0]]
