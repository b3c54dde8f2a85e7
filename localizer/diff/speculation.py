"""Speculative decoding on both sides: what was verified, accepted and proposed."""

from __future__ import annotations

import numpy as np

from localizer.diff.align import Alignment
from localizer.diff.drafts import draft_steps
from localizer.diff.order import causal_sort
from localizer.diff.result import Acceptance, ProposalFirst, Proposals, Speculation
from localizer.store.expected import is_draft
from localizer.store.reader import Capture, Table
from localizer.store.schema import DECIDES_TOKEN, DECODE, VERIFY_ACCEPTED, VERIFY_REJECTED


def speculation(candidate: Capture, parent: Capture, alignment: Alignment) -> Speculation | None:
    """What both captures say of it; None when neither holds a verification or a draft's row."""
    one, other = candidate.table, parent.table
    if not any((table.columns["kind"] >= VERIFY_ACCEPTED).any() for table in (one, other)):
        return None
    return Speculation(
        candidate=_acceptance(one, alignment.candidate, other, alignment.parent),
        parent=_acceptance(other, alignment.parent, one, alignment.candidate),
        proposals=_proposals(candidate, parent, alignment),
    )


def _acceptance(table: Table, rows: np.ndarray, other: Table, others: np.ndarray) -> Acceptance:
    columns = table.columns
    kinds, paired = columns["kind"], columns["kind"][rows]
    accepted, rejected = (int((kinds == kind).sum()) for kind in (VERIFY_ACCEPTED, VERIFY_REJECTED))
    verifying = np.isin(kinds, (VERIFY_ACCEPTED, VERIFY_REJECTED))
    keys = np.left_shift(columns["step"][verifying].astype(np.int64), 32) + columns["request"][verifying]
    verifications = len(np.unique(keys))
    decode = (paired == VERIFY_ACCEPTED) & (other.columns["kind"][others] == DECODE)
    return Acceptance(
        verifications=verifications,
        proposed=accepted + rejected - verifications,
        accepted=max(accepted - verifications, 0),  # the last verification of a killed run may be torn
        accepted_rows=accepted,
        rejected_rows=rejected,
        accepted_paired=int((paired == VERIFY_ACCEPTED).sum()),
        rejected_paired=int((paired == VERIFY_REJECTED).sum()),
        accepted_with_decode=int(decode.sum()),
    )


def _proposals(candidate: Capture, parent: Capture, alignment: Alignment) -> Proposals:
    """Compare the tokens proposed from paired draft rows: no site holds them."""
    ours, theirs = candidate.table.columns, parent.table.columns
    rows, others = alignment.candidate, alignment.parent
    both = is_draft({"kind": ours["kind"][rows]}) & (ours["logits"][rows] == DECIDES_TOKEN)
    both &= theirs["logits"][others] == DECIDES_TOKEN
    rows, others = rows[both], others[both]
    rows = rows[ours["sampled"][rows] != theirs["sampled"][others]]
    first = None
    if len(rows):
        row = rows[causal_sort(candidate, rows)[0]]
        first = ProposalFirst(
            request=candidate.requests[ours["request"][row]],
            position=int(ours["position"][row]),
            step=int(ours["step"][row]),
            draft_step=int(draft_steps(ours["kind"][row : row + 1])[0]),
        )
    return Proposals(compared=len(others), differ=len(rows), first=first)
