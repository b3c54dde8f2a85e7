"""Were the key and value rows that an attention output read written equal on both sides?"""

from __future__ import annotations

import numpy as np

from localizer.diff.align import Alignment
from localizer.diff.compare import Comparison
from localizer.diff.places import Place, key_value_sites
from localizer.diff.result import KeyValueRows
from localizer.store.expected import is_draft
from localizer.store.prefix import prefix_digests
from localizer.store.reader import Capture
from localizer.store.schema import DIGEST_BYTES, VERIFY_REJECTED, HiddenPrompt


def key_value_rows(
    candidate: Capture, alignment: Alignment, comparison: Comparison, pair: int, output: Place
) -> KeyValueRows:
    """Look at the layer's key and value rows of all earlier positions of a row's request.

    For latent attention these are the latent and the rotated part of the key.

    For the target, a position counts by the rows of its own request; one that the request did not compute (a
    prefix-cache hit) counts by the rows of equal prefix that other requests computed earlier. For a draft, a
    position counts by the row of the request that wrote it last.
    """
    row = int(alignment.candidate[pair])
    position = int(candidate.table.columns["position"][row])
    names = key_value_sites(output, alignment.sites, alignment.owners)
    sites = [index for index, name in enumerate(alignment.sites) if name in names]
    nothing = KeyValueRows(positions=position, equal=0, differ=0, not_compared=position)
    if len(sites) < 2:
        return nothing
    if output.draft:
        known, differ = _written_last(candidate, alignment, comparison, row, sites)
    else:
        prefixes = chain(candidate, row)
        if prefixes is None:
            return nothing
        known, differ = _on_chain(candidate, alignment, comparison, row, sites, prefixes)
    return KeyValueRows(
        positions=position,
        equal=known - differ,
        differ=differ,
        not_compared=position - known,
    )


def _on_chain(
    candidate: Capture,
    alignment: Alignment,
    comparison: Comparison,
    row: int,
    sites: list[int],
    along: np.ndarray,
) -> tuple[int, int]:
    """For a row of the target: how many earlier positions were compared, and how many of them differ."""
    columns, prefixes = candidate.table.columns, candidate.table.prefix
    position, step, request = (int(columns[name][row]) for name in ("position", "step", "request"))
    rows = alignment.candidate
    eligible = np.flatnonzero((columns["position"][rows] < position) & (columns["step"][rows] <= step))
    at = columns["position"][rows[eligible]]
    on_chain = eligible[(prefixes[rows[eligible]] == along[at]).all(axis=1)]
    on_chain = on_chain[comparison.compared[on_chain][:, sites].all(axis=1)]
    at = columns["position"][rows[on_chain]]
    own = columns["request"][rows[on_chain]] == request
    differ = comparison.differ[on_chain][:, sites].any(axis=1)
    computed, different, foreign, foreign_different = (np.zeros(position, np.bool_) for _ in range(4))
    computed[at[own]] = True
    different[at[own & differ]] = True
    foreign[at[~own]] = True
    foreign_different[at[~own & differ]] = True
    different |= ~computed & foreign_different
    return int((computed | foreign).sum()), int(different.sum())


def _written_last(
    candidate: Capture, alignment: Alignment, comparison: Comparison, row: int, sites: list[int]
) -> tuple[int, int]:
    """For a row of a draft: how many earlier positions were compared, and how many of them differ."""
    columns = candidate.table.columns
    before = {name: columns[name][:row] for name in ("request", "position", "kind")}
    mine = is_draft(before) & (before["request"] == columns["request"][row])
    rows = np.flatnonzero(mine & (before["position"] < columns["position"][row]))[::-1]
    _, last = np.unique(before["position"][rows], return_index=True)  # rows are in the order of computation
    pairs = np.flatnonzero(np.isin(alignment.candidate, rows[last]))
    known = comparison.compared[pairs][:, sites].all(axis=1)
    return int(known.sum()), int((known & comparison.differ[pairs][:, sites].any(axis=1)).sum())


def chain(candidate: Capture, row: int) -> np.ndarray | None:
    """uint8 [position, 16]: prefixes of the earlier positions of a row's request; None if not known.

    The tokens are the prompt's, the returned ones, and those of the row's own step: drafts being verified.
    """
    columns = candidate.table.columns
    request = candidate.requests[columns["request"][row]]
    position = int(columns["position"][row])
    prompt = candidate.prompts[request]
    same = (columns["step"] == columns["step"][row]) & (columns["request"] == columns["request"][row])
    same &= ~is_draft(columns) & (columns["position"] <= position)
    if isinstance(prompt, HiddenPrompt):
        return _recorded(candidate, row, prompt)
    tokens = [*prompt, *candidate.outputs.get(request, [])][: position + 1]
    for at, token in zip(columns["position"][same].tolist(), columns["token"][same].tolist(), strict=True):
        tokens[at : at + 1] = [token]
    if len(tokens) <= position or tokens[position] != columns["token"][row] or min(tokens) < 0:
        return None
    found = np.frombuffer(prefix_digests(tokens), np.uint8).reshape(-1, DIGEST_BYTES)
    if not np.array_equal(found[position], candidate.table.prefix[row]):
        return None
    return found[:position]


def _recorded(candidate: Capture, row: int, prompt: HiddenPrompt) -> np.ndarray | None:
    """`chain` where tokens are not told: the prompt's prefixes, and behind it those of the request's rows.

    Rows of rejected drafts count only in the row's own step.
    """
    columns, position = candidate.table.columns, int(candidate.table.columns["position"][row])
    mine = (columns["request"] == columns["request"][row]) & ~is_draft(columns)
    mine &= columns["position"] <= position
    own = columns["step"] == columns["step"][row]
    found = np.zeros((position + 1, DIGEST_BYTES), np.uint8)
    for rows in (np.flatnonzero(mine & (columns["kind"] != VERIFY_REJECTED)), np.flatnonzero(mine & own)):
        found[columns["position"][rows]] = candidate.table.prefix[rows]
    hidden = prompt.table()[: position + 1]
    found[: len(hidden)] = hidden
    if not found.any(axis=1).all() or not np.array_equal(found[position], candidate.table.prefix[row]):
        return None
    return found[:position]
