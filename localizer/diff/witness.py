"""The witness: which rows lead to the first difference, and did they come again?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from localizer.diff.align import Alignment, align, comparable
from localizer.diff.attribution import NO_CONTROL
from localizer.diff.compare import compare
from localizer.diff.result import Result
from localizer.diff.runs import Reproduction, Way
from localizer.store.digest import row_digest
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
    """Compare, by digest, the rows on the ways with those of the first pass, at all sites that both have.

    Where the first pass took digests by another algorithm, the kept rows are hashed by that one.
    """
    alignment = align(again, before)
    wanted = np.unique(np.concatenate([_rows(before, way) for way in chosen]))
    pairs = np.flatnonzero(np.isin(alignment.parent, wanted))
    part = replace(alignment, candidate=alignment.candidate[pairs], parent=alignment.parent[pairs])
    found = compare(again, before, part)
    hashed = _hashed_anew(again, before, part)
    rows, sites = np.nonzero(found.differ[np.arange(len(part))])
    differ = [*zip(rows.tolist(), part.candidate_sites[sites].tolist(), strict=True), *hashed.differ]
    request, position, site = _first(again, part, differ)
    return Reproduction(
        capture=again.label,
        rows=len(wanted),
        rows_missing=len(wanted) - len(pairs),
        compared=int(found.compared_rows.sum()) + hashed.compared,
        differ=len(differ),
        missing=_missing(again, before, part) + hashed.missing,
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


def attributed(found: Result, first_pass: Result) -> Result:
    """The diff of reproduced witnesses, with what controls showed in the first pass at the same first place.

    Witnesses have no digests in common with controls whose rows were hashed on a GPU.
    """
    if found.attribution != NO_CONTROL or found.first is None or first_pass.first is None:
        return found
    here, there = (
        (it.request, it.position, it.kind, it.site, it.parent_request, it.parent_step)
        for it in (found.first, first_pass.first)
    )
    if here != there:
        return found
    return msgspec.structs.replace(found, attribution=first_pass.attribution, controls=first_pass.controls)


def _first(
    capture: Capture, part: Alignment, differ: Sequence[tuple[int, int]]
) -> tuple[str | None, int | None, str | None]:
    """Request, position and site of the first of the pairs that differ, each with a column of the table."""
    if not differ:
        return None, None, None
    pair, column = min(differ)
    columns, row = capture.table.columns, part.candidate[pair]
    return (
        capture.requests[columns["request"][row]],
        int(columns["position"][row]),
        capture.sites[column].name,
    )


@dataclass
class _Hashed:
    """Witness rows against digests of another algorithm; `differ`: pairs and columns of the table."""

    compared: int = 0
    missing: int = 0
    differ: list[tuple[int, int]] = field(default_factory=list)


def _hashed_anew(again: Capture, before: Capture, part: Alignment) -> _Hashed:
    """Hash what the witness kept at sites of which the first pass has digests of another algorithm."""
    found = _Hashed()
    columns = {site.name: column for column, site in enumerate(again.sites)}
    others = [column for column, site in enumerate(before.sites) if site.name in part.other_digest]
    present, digest = (array[part.parent][:, others] for array in (before.table.present, before.table.digest))
    for index, site in enumerate(before.sites[column] for column in others):
        column = columns[site.name]
        same = (again.sites[column].dtype, again.sites[column].shape) == (site.dtype, site.shape)
        for pair in np.flatnonzero(present[:, index]).tolist():
            kept = again.row_payload(site.name, int(part.candidate[pair]))
            if kept is None:
                found.missing += 1
                continue
            found.compared += 1
            if not same or row_digest(site.digest, kept.tobytes()) != digest[pair, index].tobytes():
                found.differ.append((pair, column))
    return found
