"""One capture against itself: is its source consistent across batches, passes, chunks and retries?"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from localizer.diff import verdict
from localizer.diff.align import WITHIN, Alignment, keyed, others, owners
from localizer.diff.keyvalue import chain
from localizer.diff.places import Place, key_value_sites
from localizer.diff.result import CAPTURE, KeyValueRows, Reason
from localizer.diff.tokens import numbering
from localizer.store.expected import is_draft
from localizer.store.reader import Capture, Table


def align_within(capture: Capture) -> Alignment:
    """Pair each row with the first earlier one of equal key; the later stands where a candidate's would."""
    later, earlier = pair_within(capture.table)
    sites = np.arange(len(capture.sites))
    return Alignment(
        by=WITHIN,
        candidate=later,
        parent=earlier,
        unpaired_candidate=others(later, len(capture.table)),
        unpaired_parent=others(earlier, len(capture.table)),
        sites=tuple(site.name for site in capture.sites),
        candidate_sites=sites,
        parent_sites=sites,
        candidate_only=(),
        parent_only=(),
        owners=owners(capture),
    )


def pair_within(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Rows (later, first earlier) of equal key, whatever their requests; int64 [pairs], later ascends."""
    (keys,) = keyed(table, with_request=False)
    rows = np.flatnonzero(keys)
    _, first, group = np.unique(keys[rows], return_index=True, return_inverse=True)
    earlier = rows[first[group]]
    again = earlier < rows
    return rows[again], earlier[again]


def requests_within(capture: Capture) -> list[tuple[str, str]]:
    """Requests (later, first earlier) of equal prompt."""
    number, known = numbering(), dict[int, str]()
    pairs = ((name, known.setdefault(number(prompt), name)) for name, prompt in capture.prompts.items())
    return [(later, first) for later, first in pairs if later != first]


def told_once(reasons: Iterable[Reason]) -> list[Reason]:
    """Reasons about the two sides as reasons about the one capture that both of them are."""
    code = {verdict.NO_COMMON_PREFIX: verdict.NOTHING_REPEATS}
    once = {
        Reason(code=code.get(item.code, item.code), source=CAPTURE, detail=item.detail): None
        for item in reasons
    }
    return list(once)


def key_value_within(capture: Capture, row: int, other: int, output: Place) -> KeyValueRows:
    """Compare what two requests wrote at the earlier positions that their attention outputs read.

    Unlike across captures, the rows of one position need not pair with each other: each may pair with that
    of a third request. So the rows that the two requests computed themselves are compared directly.
    """
    table, position = capture.table, int(capture.table.columns["position"][row])
    names = key_value_sites(output, [site.name for site in capture.sites], owners(capture))
    columns = np.array([i for i, site in enumerate(capture.sites) if site.name in names], np.int64)
    prefixes = None if output.draft else chain(capture, row)
    if len(columns) < 2 or prefixes is None:
        return KeyValueRows(positions=position, equal=0, differ=0, not_compared=position)
    ours, theirs = (_written(table, it, position, prefixes) for it in (row, other))
    both = (ours >= 0) & (theirs >= 0)
    present, other_present = (table.present[rows[both]][:, columns] for rows in (ours, theirs))
    digest, other_digest = (table.digest[rows[both]][:, columns] for rows in (ours, theirs))
    known = (present & other_present).all(axis=1)
    differ = known & (digest != other_digest).any(axis=(1, 2))
    compared, different = int(known.sum()), int(differ.sum())
    return KeyValueRows(
        positions=position,
        equal=compared - different,
        differ=different,
        not_compared=position - compared,
    )


def _written(table: Table, row: int, position: int, prefixes: np.ndarray) -> np.ndarray:
    """int64 [position]: the row that the request of `row` computed last at each position; -1 for none."""
    columns = table.columns
    mine = (columns["request"] == columns["request"][row]) & (columns["position"] < position)
    mine &= (columns["step"] <= columns["step"][row]) & ~is_draft(columns)
    rows = np.flatnonzero(mine)
    rows = rows[(table.prefix[rows] == prefixes[columns["position"][rows]]).all(axis=1)]
    found = np.full(position, -1, np.int64)
    found[columns["position"][rows]] = rows
    return found
