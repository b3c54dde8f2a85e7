"""The sentences about speculative decoding: acceptance, what fed a draft's row, drafts that alone differ."""

from __future__ import annotations

from collections import Counter

from localizer.diff.places import INSIDE, place
from localizer.diff.result import CANDIDATE, PARENT, Acceptance, Finding, ProposalFirst, Proposals, Result
from localizer.report.counts import count
from localizer.report.safe import clean


def summary(result: Result) -> str:
    """Acceptance of both sides, and how their rows were compared, in one line; empty without speculation."""
    found = result.speculation
    if found is None:
        return ""
    one, other = found.candidate, found.parent
    ours, theirs = _accepted(one), _accepted(other)
    said = [f"both {ours}" if ours == theirs else f"the candidate {ours}, the parent {theirs}"]
    if result.coverage.pairs.compared:
        if one.verifications and _rows(one, "either side") == _rows(other, "either side"):
            said.append(_rows(one, "either side"))
        else:
            sides = ((CANDIDATE, one, PARENT), (PARENT, other, CANDIDATE))
            said += [_rows(it, f"the {side}", f"the {then}") for side, it, then in sides if it.verifications]
        if found.proposals.compared:
            said.append(_proposals(found.proposals))
    return "; ".join(said)


def _accepted(found: Acceptance) -> str:
    if not found.verifications:
        return "verified none"
    tokens = f"accepted {found.accepted:,} of {count(found.proposed, 'draft token')}"
    return f"{tokens} in {count(found.verifications, 'verification')}"


def _rows(found: Acceptance, side: str, other: str = "") -> str:
    """Which of one side's verification rows were compared."""
    rejected = f"{found.rejected_paired:,} of {found.rejected_rows:,} rejected"
    if found.accepted_with_decode == found.accepted_rows:
        every = f"all {count(found.accepted_rows, 'accepted row')} of {side} pair with decode rows of {other}"
        return f"{every}, {rejected if found.rejected_paired else 'no rejected'} rows with any"
    rows = f"{found.accepted_paired:,} of {found.accepted_rows:,} accepted and {rejected} rows of {side}"
    decode = found.accepted_with_decode
    plain = f", {decode:,} of the accepted ones with decode rows" if decode else ""
    return f"{rows} are compared{plain}"


def _proposals(found: Proposals) -> str:
    rows = count(found.compared, "paired draft row")
    if not found.differ:
        return f"the tokens proposed from {rows} are equal"
    first = "" if found.first is None else f", first at {_proposal(found.first)}"
    return f"the tokens proposed from {found.differ:,} of {rows} differ{first}"


def only_draft(result: Result) -> str:
    """That the target's compared rows are all equal, if it is a draft's row that differs; else empty."""
    pairs = result.coverage.pairs
    if not pairs.draft_differ or pairs.differ != pairs.draft_differ:
        return ""
    target = pairs.compared - pairs.draft_compared
    equal = f"all {count(target, 'compared row × site pair')} of the target are equal"
    return f"only draft rows differ, {equal if target else 'no row of the target was compared'}"


def only_proposals(result: Result) -> str:
    """That nothing differs but tokens which a draft proposed."""
    found = result.speculation.proposals if result.speculation is not None else None
    if found is None or found.first is None:
        return "something differs"
    return f"only proposed draft tokens differ, first at {_proposal(found.first)}; no compared site differs"


def _proposal(first: ProposalFirst) -> str:
    where = f"request {clean(first.request)}, position {first.position}"
    return f"{where} (step {first.step}, draft step {first.draft_step})"


def other_drafts(result: Result) -> str:
    """That the two sides did not run the same draft model; empty if they did, or if it is not known."""
    if result.coverage.draft_files_equal is not False:
        return ""
    return "The two ran different draft models (their files differ)."


def fed_by(finding: Finding) -> str:
    """Whether the row whose hidden states were fed to a draft's row was equal, as a further sentence."""
    fed = finding.fed_by
    if fed is None:
        return ""
    if fed.draft_step:
        what = f" It goes on from draft step {fed.draft_step}, position {fed.position}"
        equal, blamed = "the difference enters between the two, or in this one", "that draft step"
    else:
        auxiliary = any(place(name).stage == INSIDE for name in fed.sites)
        which = "auxiliary" if auxiliary else "final"
        what = f" It was fed the target's {which} hidden states of position {fed.position}"
        equal, blamed = (
            "the difference enters on the way into the draft or in it, not in the target",
            "the target",
        )
    sites = count(len(fed.sites), "site")
    if fed.differ:
        return f"{what}, which differ at {fed.differ:,} of {sites}: the difference comes from {blamed}."
    if fed.not_compared or not fed.sites:
        held = f"only {fed.equal:,} of {sites} compared (equal)" if fed.equal else "not compared"
        return f"{what}, {held}: a fault of {blamed} is not ruled out."
    return f"{what}, equal at {'all ' * (len(fed.sites) > 1)}{sites}: {equal}."


def takes_in(finding: Finding) -> str:
    """The piece of a draft's segment at which hidden states come in; empty for a draft that takes none."""
    fed = finding.fed_by
    if fed is None:
        return ""
    if not fed.draft_step and fed.equal == len(fed.sites) > 0:
        return "what takes in the hidden states fed to it"
    return "the hidden states fed to it, or what takes them in"


def kinds(rows: dict[str, int]) -> str:
    """Kinds of rows in brackets, where some are of speculation: ` (175 draft, 71 verify-rejected)`."""
    if not any(kind.startswith(("draft", "verify")) for kind in rows):
        return ""
    grouped: Counter[str] = Counter()
    for kind, number in rows.items():
        grouped["draft" if kind.startswith("draft") else kind] += number
    return f" ({', '.join(f'{number:,} {clean(kind)}' for kind, number in grouped.most_common())})"
