"""What is said about captures: when one was made, what it holds, the history, whether it is sound."""

from __future__ import annotations

from pathlib import Path

from localizer.errors import DamagedCapture
from localizer.report.facts import facts_lines
from localizer.report.native import native_code
from localizer.report.probes import probed
from localizer.report.safe import clean
from localizer.store import names, runs
from localizer.store.digest import XXH3
from localizer.store.reader import Capture
from localizer.store.schema import Manifest, Open, Workload
from localizer.store.verify import DAMAGED, SOUND, ArchiveVerification, Verification
from localizer.wire.versions import seen_on

MATRIX_SHOWN = 100
"""Batch sizes that are shown."""

COMMIT_SHOWN = 12
"""Digits of a commit in the list of captures."""


def made(capture: Capture) -> str:
    """The sentence after `localize capture`."""
    work = capture.open.workload
    manifest = capture.manifest
    assert manifest is not None
    tokens = sum(len(output.tokens) for output in manifest.outputs)
    lines = [
        f"{capture.folder}: {manifest.state}, {len(manifest.outputs)} requests in "
        f"{len(work.matrix) * work.repeats} rounds, {tokens:,} tokens"
        + (
            f", {manifest.counts['rows']:,} rows at {len(manifest.sites)} sites"
            if capture.open.observer.taps
            else ", no taps"
        )
        + f", {_size(capture)}, {manifest.durations['total']:.0f} s"
    ]
    lines += [f"  incomplete: {clean(reason)}" for reason in capture.reasons]
    lines += [f"  {sentence}" for sentence in not_rebuilt(capture)]
    lines += [f"  {sentence}" for sentence in left(manifest)]
    lines += [f"  probe {probed(probe)}" for probe in manifest.probes]
    lines += [f"  untested version: {sentence}" for sentence in untested(capture)]
    return "\n".join(lines)


def not_rebuilt(capture: Capture) -> list[str]:
    """That native code of the source was not rebuilt, if it changes any."""
    overlay = capture.open.source.overlay
    return [] if overlay is None or overlay.native is None else [native_code(overlay.native)]


def left(manifest: Manifest) -> list[str]:
    """What the run left on the machine, if anything."""
    said = []
    alive = manifest.counts.get("left_processes", 0)
    if alive:
        said.append(f"processes of the run that would not end: {alive:,}")
    names = [f"{clean(name)} ({clean(state)})" for name, state in manifest.left_shared_memory.items()]
    if names:
        said.append(f"the run left shared memory: {_some(names, 'file')}")
    said += [
        f"on GPU {clean(gpu.uuid)} {gpu.left >> 20:,} MiB more are in use than before the run: "
        "left by it, or taken by another program"
        for gpu in manifest.gpu_memory
        if gpu.left
    ]
    return said


def untested(capture: Capture) -> list[str]:
    """That the vLLM of a capture is none on which localizer was seen to work, if so."""
    engine = capture.manifest.engine if capture.manifest is not None else {}
    adapter, ran = engine.get("adapter"), engine.get("versions")
    if not isinstance(adapter, dict) or adapter.get("seen") is not False:
        return []
    version = ran.get("vllm") if isinstance(ran, dict) else capture.open.source.vllm
    runner, platform = str(adapter.get("runner")), str(adapter.get("platform"))
    known = ", ".join(seen_on(platform, runner)) or "no version"
    return [
        f"vLLM {clean(str(version))} with the {clean(runner.upper())} model runner on {clean(platform)}; "
        f"localizer was seen to work there on {known}"
    ]


def details(capture: Capture) -> str:
    """What `localize show` prints: identity, workload, observer, what was recorded."""
    opening, work, source = capture.open, capture.open.workload, capture.open.source
    lines = [f"{clean(capture.label)}  {'complete' if capture.complete else 'incomplete'}"]
    lines += [f"  incomplete    {clean(reason)}" for reason in capture.reasons]
    lines += [f"  untested      {sentence}" for sentence in untested(capture)]
    if opening.reduced is not None:
        lines.append(f"  reduced       from {clean(opening.reduced.of)}")
        lines += [f"                without {clean(what)}" for what in opening.reduced.left_out]
    lines += [
        f"  made          {clean(opening.created)} by localizer {clean(opening.localizer)}",
        f"  source        vLLM {clean(source.vllm) or 'unknown'}, torch {clean(source.torch)}, "
        f"Python {clean(source.python_version)} ({clean(source.python)})",
    ]
    if source.overlay is not None:
        files = sorted(source.overlay.files)
        git = source.overlay.git
        if git is not None:
            lines.append(
                f"  git           {clean(git.repository)}@{clean(git.revision)}, commit {clean(git.commit)}"
            )
        lines.append(
            f"  overlay       {clean(source.overlay.path)}: {_some([clean(name) for name in files], 'file')}"
        )
        lines += [f"                {sentence}" for sentence in not_rebuilt(capture)]
    lines += [
        f"  model         {clean(work.model.name)}",
        f"  workload      matrix {_matrix(work)} x {work.repeats}, "
        f"{work.prompt_tokens} prompt tokens, {work.max_tokens} new tokens, seed {work.seed}",
        *(f"  {line}" for line in _phases(opening)),
        f"  engine        {clean(_pairs(work.engine)) or 'as vLLM sets it'}",
        f"  environment   {clean(_pairs(opening.environment)) or 'nothing recorded'}",
        "  observer      "
        + (f"layers {clean(opening.observer.layers)}, level {clean(opening.observer.level)}, "
           f"payload {clean(opening.observer.payload)}"
           if opening.observer.taps else "no taps"),
    ]  # fmt: skip
    chosen = {
        "sites": opening.observer.sites != ("*",) and opening.observer.sites,
        "rows": opening.observer.rows != ("all",) and opening.observer.rows,
        "transactions": opening.observer.transactions != "all" and [opening.observer.transactions],
    }
    lines += [
        f"                {what} {clean(', '.join(some))}"
        for what, some in chosen.items()
        if some and opening.observer.taps
    ]
    lines += [f"                changes {clean(change)}" for change in opening.observer.changes]
    table, recorded = capture.table, capture.table.recorded()
    workers = f" of {opening.observer.ranks} workers" if opening.observer.ranks > 1 else ""
    lines.append(f"  rows          {len(table):,} at {len(capture.sites)} sites{workers}, {_size(capture)}")
    for index, site in enumerate(capture.sites):
        shape = "x".join(map(str, site.shape or ())) or "1"
        kept = capture.payload.get(site.name, 0)
        lines.append(
            f"    {clean(site.name):<44} {clean(site.dtype):<10} {shape:<10} "
            f"{recorded[index]:>8,} digests {kept:>8,} kept"
            + ("" if site.digest == XXH3 else f"  {clean(site.digest)}")
        )
    if capture.manifest is not None:
        manifest = capture.manifest
        lines += [
            f"    {clean(name):<44} not applicable: {clean(why)}"
            for name, why in manifest.not_applicable.items()
        ]
        lines.append(f"  counts        {clean(_pairs(manifest.counts))}")
        lines += [f"                {sentence}" for sentence in left(manifest)]
        lines += [f"  probe         {probed(probe)}" for probe in manifest.probes]
        facts = {key: value for key, value in manifest.engine.items() if not isinstance(value, dict)}
        lines.append(f"  running       {clean(_pairs(facts), 1000)}")
        lines += facts_lines(capture)
        seconds = {key: round(value, 1) for key, value in manifest.durations.items()}
        lines.append(f"  seconds       {clean(_pairs(seconds))}")
    return "\n".join(lines)


def _phases(opening: Open) -> list[str]:
    """The phases of an intervention and what was to be changed; nothing where there are none."""
    done = opening.intervention
    if done is None:
        return []
    each = len(opening.workload.matrix) * done.repeats
    spans = [
        f"{clean(name)} rounds {number * each:02}-{number * each + each - 1:02}"
        for number, name in enumerate(done.phases)
    ]
    patches = [
        f"patch         {clean(patch.target)} = {clean(patch.name)} of {clean(patch.path)} "
        f"(xxh3-128 {clean(patch.xxh3_128)})"
        for patch in done.patches
    ]
    return [f"phases        {', '.join(spans)} ({clean(done.kind)})", *patches]


def history(root: Path) -> str:
    """What `localize list` prints: one line a capture."""
    rows: list[tuple[str, ...]] = [("capture", "made", "vLLM", "model", "workload", "state")]
    found = [
        _line(folder, f"{name}/{folder.name}")
        for name in names.names(root)
        for folder in names.numbered(root / name)
        if (folder / "open.json").is_file()
    ]
    rows += sorted(found, key=lambda row: row[1])
    records = runs.folders(root)
    if len(rows) == 1 and not records:
        return (
            f"There are no captures in {clean(str(root))}; make one with localize capture NAME --model MODEL."
        )
    lines = _columns(rows)
    if records:
        lines += ["", *_columns([("run", "made", "captures", "verdict"), *map(_run, records)])]
    return "\n".join(lines)


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _run(folder: Path) -> tuple[str, ...]:
    """The line of a run of `localize run`."""
    run = runs.read(folder)
    if run is None:
        return clean(f"{names.RUNS}/{folder.name}"), "", "", "damaged"
    made = str(len(runs.finished_captures(folder)))
    parts = [runs.verdict(folder), None if runs.finished(folder) else "not finished"]
    verdict = ", ".join(filter(None, parts))
    return clean(f"{names.RUNS}/{folder.name}"), clean(run.created), made, verdict


def _line(folder: Path, label: str) -> tuple[str, ...]:
    try:
        capture = Capture(folder)
    except DamagedCapture:
        return clean(label), "", "", "", "", "damaged"
    work, source = capture.open.workload, capture.open.source
    changed = ""
    if source.overlay is not None:
        git = source.overlay.git
        commit = "" if git is None else f" ({clean(git.commit[:COMMIT_SHOWN])})"
        changed = f" + {len(source.overlay.files)} changed{commit}"
    return (
        clean(label),
        clean(capture.open.created),
        clean(source.vllm) + changed,
        clean(work.model.name),
        f"{_matrix(work)} x {work.repeats}, {work.max_tokens} tokens",
        capture.state,
    )


def verification(folder: Path | str, result: Verification) -> str:
    """What `localize verify` prints."""
    if result.state == DAMAGED:
        return f"damaged: {clean(result.reasons[0], 4000)}"
    checked = f"{result.files} files, {result.size:,} bytes and {result.rows:,} rows are as recorded"
    where = clean(str(folder), 4000)
    if result.state == SOUND:
        return f"sound and complete: {where}: {checked}."
    return (
        f"sound but incomplete: {where}: {checked}; "
        + "; ".join(clean(reason) for reason in result.reasons)
        + "."
    )


def archive_verification(path: Path, result: ArchiveVerification) -> str:
    """What `localize verify` prints of an archive: a line for it, and one for each capture."""
    if result.reasons:
        return f"damaged: {clean(result.reasons[0], 4000)}"
    lines = [
        f"{clean(str(path), 4000)}: {result.members} members have their checksums. What is said beside the "
        "captures (result.json) is not checked: localize diff compares them again."
    ]
    return "\n".join([*lines, *(verification(name, found) for name, found in result.captures.items())])


def _size(capture: Capture) -> str:
    size = float(sum(file.size for file in capture.files))
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _matrix(work: Workload) -> str:
    """Batch sizes as they are typed, the first of very many."""
    sizes = ",".join(map(str, work.matrix[:MATRIX_SHOWN]))
    return sizes if len(work.matrix) <= MATRIX_SHOWN else f"{sizes},..."


def _pairs(table: dict[str, object] | dict[str, str] | dict[str, int] | dict[str, float]) -> str:
    return ", ".join(f"{key}={value}" for key, value in table.items())


def _some(items: list[str], noun: str, limit: int = 5) -> str:
    more = f" and {len(items) - limit} more {noun}s" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
