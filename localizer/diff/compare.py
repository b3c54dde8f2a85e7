"""Digest against digest for every paired row and shared site."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localizer.diff.align import Alignment
from localizer.store.expected import applicable
from localizer.store.reader import Capture, Table

CHUNK_BYTES = 32 << 20
"""Digests compared at a time, so that memory stays flat where the tables are mapped files."""


@dataclass(frozen=True)
class Comparison:
    """What the digests say.

    Attributes:
        compared: bool [pairs, sites], both sides hold the row.
        differ: bool [pairs, sites], compared, and of other bytes, dtype or shape.
        missing_candidate, missing_parent: int64 [sites], pairs whose row should be there and is not.
    """

    compared: np.ndarray
    differ: np.ndarray
    missing_candidate: np.ndarray
    missing_parent: np.ndarray


def compare(candidate: Capture, parent: Capture, alignment: Alignment) -> Comparison:
    """Compare the digests of all pairs."""
    pairs, sites = len(alignment), len(alignment.sites)
    present = np.zeros((pairs, sites), np.bool_), np.zeros((pairs, sites), np.bool_)
    equal = np.zeros((pairs, sites), np.bool_)
    one, other = candidate.table, parent.table
    step = max(1, CHUNK_BYTES // max(1, 32 * sites))
    for start in range(0, pairs, step):
        part = slice(start, start + step)
        left, right = alignment.candidate[part], alignment.parent[part]
        present[0][part] = _take(one.present, left, alignment.candidate_sites)
        present[1][part] = _take(other.present, right, alignment.parent_sites)
        ours = _take(_words(one), left, alignment.candidate_sites)
        theirs = _take(_words(other), right, alignment.parent_sites)
        equal[part] = (ours[..., 0] == theirs[..., 0]) & (ours[..., 1] == theirs[..., 1])
    equal &= same_layout(candidate, parent, alignment)
    compared = present[0] & present[1]
    return Comparison(
        compared,
        compared & ~equal,
        _missing(candidate, alignment.candidate, alignment.candidate_sites, present[0]),
        _missing(parent, alignment.parent, alignment.parent_sites, present[1]),
    )


def same_layout(candidate: Capture, parent: Capture, alignment: Alignment) -> np.ndarray:
    """Bool [sites]: whether a site's rows have the same dtype and shape on both sides."""
    ours, theirs = candidate.sites, parent.sites
    columns = zip(alignment.candidate_sites, alignment.parent_sites, strict=True)
    return np.array(
        [(ours[i].dtype, ours[i].shape) == (theirs[j].dtype, theirs[j].shape) for i, j in columns], np.bool_
    )


def _missing(capture: Capture, rows: np.ndarray, site_columns: np.ndarray, present: np.ndarray) -> np.ndarray:
    """int64 [sites]: rows that a site should have and has not."""
    skipped = capture.manifest.not_applicable if capture.manifest is not None else {}
    sites = [capture.sites[column] for column in site_columns]
    columns = {name: capture.table.columns[name][rows] for name in ("kind", "logits")}
    wanted = {site.rows: applicable(columns, site.rows) for site in sites}
    return np.array(
        [
            0 if site.name in skipped else int((wanted[site.rows] & ~present[:, index]).sum())
            for index, site in enumerate(sites)
        ],
        np.int64,
    )


def _words(table: Table) -> np.ndarray:
    """The digests as uint64 [rows, sites, 2]."""
    return table.digest.view(np.uint64)


def _take(array: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """`array[rows][:, columns]`, as a view where both are runs."""
    picked = array[rows[0] : rows[-1] + 1] if _is_run(rows) else array[rows]
    if _is_run(columns):
        return picked[:, columns[0] : columns[-1] + 1]
    return picked[:, columns]


def _is_run(indices: np.ndarray) -> bool:
    return len(indices) > 0 and bool(np.all(np.diff(indices) == 1))
