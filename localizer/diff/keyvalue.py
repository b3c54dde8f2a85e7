"""Were the key and value rows that an attention output read written equal on both sides?"""

from __future__ import annotations

import numpy as np

from localizer.diff.align import Alignment
from localizer.diff.compare import Comparison
from localizer.diff.result import KeyValueRows
from localizer.store.prefix import RequestPrefixes
from localizer.store.reader import Capture


def key_value_rows(
    candidate: Capture, alignment: Alignment, comparison: Comparison, pair: int, layer: str
) -> KeyValueRows:
    """Look at the layer's key and value rows of all earlier positions of a row's request.

    A position counts by the rows of its own request; one that the request did not compute (a prefix-cache
    hit) counts by the rows of equal prefix that other requests computed earlier.
    """
    columns, prefixes = candidate.table.columns, candidate.table.prefix
    row = int(alignment.candidate[pair])
    position, step, request = (int(columns[name][row]) for name in ("position", "step", "request"))
    sites = [i for i, name in enumerate(alignment.sites) if name in (f"{layer}/key", f"{layer}/value")]
    chain = _chain(candidate, row)
    nothing = KeyValueRows(positions=position, equal=0, differ=0, not_compared=position)
    if len(sites) < 2 or chain is None:
        return nothing
    rows = alignment.candidate
    eligible = np.flatnonzero((columns["position"][rows] < position) & (columns["step"][rows] <= step))
    at = columns["position"][rows[eligible]]
    on_chain = eligible[(prefixes[rows[eligible]] == chain[at]).all(axis=1)]
    on_chain = on_chain[comparison.compared[np.ix_(on_chain, sites)].all(axis=1)]
    at = columns["position"][rows[on_chain]]
    own = columns["request"][rows[on_chain]] == request
    differ = comparison.differ[np.ix_(on_chain, sites)].any(axis=1)
    computed, different, foreign, foreign_different = (np.zeros(position, np.bool_) for _ in range(4))
    computed[at[own]] = True
    different[at[own & differ]] = True
    foreign[at[~own]] = True
    foreign_different[at[~own & differ]] = True
    different |= ~computed & foreign_different
    known = computed | foreign
    return KeyValueRows(
        positions=position,
        equal=int((known & ~different).sum()),
        differ=int(different.sum()),
        not_compared=int((~known).sum()),
    )


def _chain(candidate: Capture, row: int) -> np.ndarray | None:
    """uint8 [position, 16]: prefixes of the earlier positions of a row's request; None if not known."""
    columns = candidate.table.columns
    request = candidate.requests[columns["request"][row]]
    position = int(columns["position"][row])
    prompt = candidate.prompts[request]
    tokens = [*prompt, *candidate.outputs.get(request, [])][: position + 1]
    if len(tokens) <= position or tokens[position] != columns["token"][row]:
        return None
    prefixes = RequestPrefixes(prompt)
    found = [prefixes.row(index, token) for index, token in enumerate(tokens)]
    chain = np.array([np.frombuffer(item[0], np.uint8) for item in found if item is not None])
    if len(chain) != position + 1 or not np.array_equal(chain[position], candidate.table.prefix[row]):
        return None
    return chain[:position]
