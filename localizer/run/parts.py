"""Parts of a run's result that are read off its captures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from localizer.diff import verdict
from localizer.diff.result import CANDIDATE, PARENT, Difference, Reason
from localizer.diff.runs import OWN_BLOCKS, CompiledCode, Probed
from localizer.run.plan import Step
from localizer.store.reader import Capture


def kv_blocks(capture: Capture) -> int | None:
    """Blocks of its KV cache; None where it does not say."""
    count = capture.manifest.engine.get("num_kv_blocks") if capture.manifest is not None else None
    return count if isinstance(count, int) else None


def unpinned(made: Sequence[tuple[Step, Capture]], pinned: int | None) -> Iterator[Reason]:
    """Sources of which captures have another number of KV blocks than was set, if one was."""
    for side in (CANDIDATE, PARENT):
        counts = [(capture.label, kv_blocks(capture)) for step, capture in made if step.side == side]
        other = [(label, count) for label, count in counts if count != pinned]
        if pinned is not None and other:
            label, count = other[0]
            told = f"{label}: {count or 'an unknown number of'}"
            yield Reason(code=verdict.NOT_PINNED, source=side, detail=told, count=len(other))


def own_blocks(before: Mapping[str, int | None]) -> Iterator[Difference]:
    """That the sources had other numbers of KV blocks by themselves, `before` they were set, by capture."""
    ours, theirs = (
        sorted({count for label, count in before.items() if label.startswith(side) and count is not None})
        for side in (CANDIDATE, PARENT)
    )
    if ours != theirs:
        yield Difference(
            setting=OWN_BLOCKS, candidate=", ".join(map(str, ours)), parent=", ".join(map(str, theirs))
        )


def unfinished(side: str, runs: Iterable[Capture]) -> Iterator[Reason]:
    """Runs of a source that did not finish, with what they say of it."""
    for run in runs:
        if not run.complete:
            why = "; ".join(run.reasons) or "its records do not say why"
            yield Reason(code=verdict.RUN_UNFINISHED, source=side, detail=f"{run.label}: {why}")


def probes(capture: Capture) -> list[Probed]:
    """What the probes of a capture counted in its steps."""
    found = capture.manifest.probes if capture.manifest is not None else []
    return [Probed(capture=capture.label, probe=probe) for probe in found]


def compiled(one: Capture, other: Capture) -> CompiledCode:
    """Whether the code generated for two runs is the same."""
    files = [
        capture.manifest.compiled.files
        if capture.manifest is not None and capture.manifest.compiled is not None
        else {}
        for capture in (one, other)
    ]
    equal = files[0] == files[1] if all(files) else None
    return CompiledCode(one=one.label, other=other.label, equal=equal)
