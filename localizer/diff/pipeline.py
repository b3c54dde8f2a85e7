"""The whole diff of two captures: check, align, compare, localize, decide."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from localizer.diff import schedule, settings, verdict
from localizer.diff.align import Alignment, align, split_otherwise, workloads_equal
from localizer.diff.compare import Comparison, compare
from localizer.diff.control import Examined, attribute, check_controls, same
from localizer.diff.details import Details
from localizer.diff.explain import Steps
from localizer.diff.explain import explain as explained
from localizer.diff.localize import Localizer
from localizer.diff.mapped import mapped
from localizer.diff.places import place
from localizer.diff.result import (
    Both,
    CaptureFacts,
    Cause,
    Coverage,
    Finding,
    PairCoverage,
    Reason,
    Result,
    RowCoverage,
    Rows,
    SiteCoverage,
    Symptom,
    Tolerance,
)
from localizer.diff.returned import returned
from localizer.diff.speculation import speculation
from localizer.diff.summary import summarize
from localizer.diff.tokens import DecidingSteps, TokenComparison, compare_tokens
from localizer.diff.unpaired import unpaired_rows
from localizer.diff.within import align_within, requests_within, told_once
from localizer.errors import LocalizerError
from localizer.store.reader import Capture


def diff(
    candidate: Capture,
    parent: Capture,
    controls: Sequence[Capture] = (),
    *,
    tolerances: Sequence[Tolerance] = (),
    explain: bool = False,
    payload: bool = False,
    cells: bool = False,
) -> Result:
    """Compare two captures.

    Args:
        candidate: the capture whose rows and order findings are told in.
        parent: the capture to which it is compared.
        controls: further captures of the parent.
        tolerances: mark what differs by little; they change neither what is compared nor the verdict.
        explain: whether the result holds the plan.
        payload: compare rows that both sides kept as well, byte for byte.
        cells: whether the result holds what a map is drawn from, and the tokens that differ.

    Raises:
        DamagedCapture: a capture is not what its records say; checked before anything is compared, but for
            stored rows: each of them is checked when it is read.
        LocalizerError: a capture cannot be a control of the parent.
    """
    check_controls(candidate, parent, controls)
    check_keys([candidate, parent, *controls])
    for capture in (candidate, parent, *controls):
        capture.check(payload=False)
    equal = workloads_equal(candidate, parent)
    parity = compare_tokens(candidate, parent, equal_workloads=equal)
    alignment = align(candidate, parent)
    found = _diff(candidate, parent, alignment, parity, controls, tolerances, explain, payload, cells)
    if not same(candidate, parent):
        return found
    return msgspec.structs.replace(found, reasons=[*found.reasons, Reason(code=verdict.SAME_CAPTURE)])


def check_keys(captures: Sequence[Capture]) -> None:
    """Check that prefixes and digests of captures were replaced alike, if they were.

    Raises:
        LocalizerError: they were not, so nothing of them can be compared.
    """
    keys = {capture.open.reduced.key if capture.open.reduced is not None else "" for capture in captures}
    if len(keys) > 1:
        labels = ", ".join(capture.shown for capture in captures)
        raise LocalizerError(
            f"{labels} were not redacted together, so that their rows cannot be matched; "
            "name captures of one archive, or pack them with localize attach --no-redact."
        )


def diff_within(
    capture: Capture,
    *,
    tolerances: Sequence[Tolerance] = (),
    explain: bool = False,
    payload: bool = False,
    cells: bool = False,
) -> Result:
    """Compare rows of one capture with the first earlier ones of equal prefix (`localizer.diff.within`).

    Raises:
        DamagedCapture: the capture is not what its records say.
    """
    capture.check(payload=False)
    paired = requests_within(capture)
    parity = compare_tokens(capture, capture, equal_workloads=False, paired=paired)
    alignment = align_within(capture)
    found = _diff(capture, capture, alignment, parity, (), tolerances, explain, payload, cells)
    speculated = found.speculation
    if speculated is not None:
        speculated = msgspec.structs.replace(speculated, parent=speculated.candidate)
    return msgspec.structs.replace(found, reasons=told_once(found.reasons), speculation=speculated)


def _diff(
    candidate: Capture,
    parent: Capture,
    alignment: Alignment,
    parity: TokenComparison,
    controls: Sequence[Capture],
    tolerances: Sequence[Tolerance],
    explain: bool,
    payload: bool,
    cells: bool,
) -> Result:
    obstacles = verdict.not_comparable(candidate, parent, parity.tokens, len(alignment))
    comparison = Comparison.nothing(alignment) if obstacles else compare(candidate, parent, alignment)
    coverage = cover(candidate, parent, alignment, comparison, parity)
    if payload and not obstacles:
        from localizer.diff.stored import compare_stored  # threads and ctypes take time to import

        stored = compare_stored(candidate, parent, alignment, comparison)
        coverage = msgspec.structs.replace(coverage, stored=stored)
    details = Details(candidate, parent, tolerances)
    localizer = Localizer(candidate, parent, alignment, comparison, details)
    first = localizer.first()
    speculated = speculation(candidate, parent, alignment)
    other_drafts = 0 if speculated is None or obstacles else speculated.proposals.differ
    incomplete = verdict.incompleteness(candidate, parent, coverage)
    found, reasons = verdict.decide(
        obstacles,
        incomplete,
        verdict.unsteady(parity.tokens),
        parity.tokens,
        coverage.pairs.differ + other_drafts,
    )
    examined = Examined(not obstacles, candidate, parent, alignment, comparison, localizer.order, parity)
    attribution, controlled = attribute(examined, controls)
    steps = Steps(
        candidate=candidate,
        parent=parent,
        alignment=alignment,
        parity=parity,
        comparison=comparison,
        order=localizer.order,
        coverage=coverage,
        obstacles=obstacles,
        incomplete=incomplete,
        differ=bool(coverage.pairs.differ + other_drafts + parity.tokens.positions_differ),
    )
    return Result(
        plan=explained(steps) if explain else None,
        cells=mapped(steps, details) if cells else None,
        returned=returned(candidate, parent, parity) if cells else None,
        verdict=found,
        attribution=attribution,
        controls=controlled,
        reasons=reasons,
        workloads_equal=workloads_equal(candidate, parent),
        captures=Both(candidate=facts_of(candidate), parent=facts_of(parent)),
        tokens=parity.tokens,
        speculation=speculated,
        tolerances=list(tolerances),
        summary=summarize(first, attribution),
        first=first,
        first_rows=localizer.first_rows(),
        rows=Rows(
            cause=_cause(first),
            target=localizer.first_of_target(),
            amplifier=localizer.amplifier(),
            symptom=_symptom(candidate, parent, alignment, parity, details),
        ),
        requests=localizer.requests(),
        signatures=localizer.signatures(),
        histogram=localizer.histogram(),
        sites=[] if obstacles else localizer.sites(),
        coverage=coverage,
        differences=[*settings.differences(candidate, parent), *schedule.differences(candidate, parent)],
    )


def cover(
    candidate: Capture, parent: Capture, alignment: Alignment, comparison: Comparison, parity: TokenComparison
) -> Coverage:
    """What was really compared."""
    skipped: dict[str, str] = {}
    for capture in (parent, candidate):
        skipped.update(capture.manifest.not_applicable if capture.manifest is not None else {})
    ours = {request.candidate: request.first for request in parity.requests}
    theirs = {request.parent: request.first for request in parity.requests}
    files = candidate.open.workload.model.files, parent.open.workload.model.files
    drafts = candidate.open.workload.draft, parent.open.workload.draft
    draft_files = [draft.files if draft is not None else {} for draft in drafts]
    draft_sites = np.array([place(name).draft for name in alignment.sites], np.bool_)
    unpaired = (
        unpaired_rows(candidate, alignment.unpaired_candidate, ours),
        unpaired_rows(parent, alignment.unpaired_parent, theirs),
    )
    split = {
        base: Both(candidate=one, parent=other) for base, (one, other) in split_otherwise(alignment).items()
    }
    return Coverage(
        rows=RowCoverage(
            paired_by=alignment.by,
            candidate=len(candidate.table),
            parent=len(parent.table),
            paired=len(alignment),
            unpaired=Both(candidate=len(alignment.unpaired_candidate), parent=len(alignment.unpaired_parent)),
            past_token_difference=Both(candidate=unpaired[0].past, parent=unpaired[1].past),
            without_prefix=Both(candidate=unpaired[0].unknown, parent=unpaired[1].unknown),
            draft_padding=Both(candidate=unpaired[0].padding, parent=unpaired[1].padding),
            without_counterpart=Both(candidate=unpaired[0].others, parent=unpaired[1].others),
        ),
        sites=SiteCoverage(
            shared=len(alignment.sites),
            candidate_only=[name for name in alignment.candidate_only if place(name).base not in split],
            parent_only=[name for name in alignment.parent_only if place(name).base not in split],
            not_applicable=skipped,
            not_comparable={
                name: Both(candidate=one, parent=other)
                for name, (one, other) in alignment.other_digest.items()
            },
            split=split,
        ),
        pairs=PairCoverage(
            compared=int(comparison.compared_rows.sum()),
            differ=int(comparison.differ_rows.sum()),
            draft_compared=int(comparison.compared_rows[draft_sites].sum()),
            draft_differ=int(comparison.differ_rows[draft_sites].sum()),
            missing=Both(
                candidate=int(comparison.missing_candidate.sum()), parent=int(comparison.missing_parent.sum())
            ),
        ),
        layers=Both(candidate=_layers(candidate), parent=_layers(parent)),
        payload=Both(candidate=len(candidate.payload), parent=len(parent.payload)),
        model_files_equal=files[0] == files[1] if all(files) else None,
        draft_files_equal=draft_files[0] == draft_files[1] if all(draft_files) else None,
        weights_equal=settings.weights_equal(candidate, parent),
    )


def _layers(capture: Capture) -> str:
    return capture.open.observer.layers if capture.open.observer.taps else "none"


def facts_of(capture: Capture) -> CaptureFacts:
    """Which capture was read."""
    return CaptureFacts(
        label=capture.label,
        path=capture.shown,
        created=capture.open.created,
        vllm=capture.open.source.vllm,
        state=capture.state,
        native=None if capture.open.source.overlay is None else capture.open.source.overlay.native,
    )


def _cause(first: Finding | None) -> Cause | None:
    if first is None:
        return None
    return Cause(request=first.request, position=first.position, step=first.step, site=first.site)


def _symptom(
    candidate: Capture, parent: Capture, alignment: Alignment, parity: TokenComparison, details: Details
) -> Symptom | None:
    """The first differing token, with the logits of the row that decided it where both kept them."""
    first = parity.tokens.first
    if first is None or parity.first is None:
        return None
    row = DecidingSteps(candidate).row(parity.first.candidate, first.output_index)
    logits = None
    if row is not None:
        pair = np.flatnonzero(alignment.candidate == row)
        logits = details.logits(row, int(alignment.parent[pair[0]])) if len(pair) else None
    return Symptom(
        request=first.request,
        position=first.position,
        output_index=first.output_index,
        step=parity.first_step,
        logits=logits,
    )
