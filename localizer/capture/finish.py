"""Finishing a capture: from what the children reported to the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from localizer.capture import facts, ranks
from localizer.capture.request import masked
from localizer.store import schema, tensors, wait
from localizer.store.interventions import Course
from localizer.store.reader import Capture
from localizer.store.schema import Coverage, GpuMemory, Manifest, Output, Shard, Site
from localizer.store.selfcheck import apart, mistraced, unaccounted, unfinished
from localizer.wire.spec import UNREAD


@dataclass
class Heard:
    """What was heard from the children so far.

    Only `outputs` grow with the run: up to what a manifest holds, which is checked before anything starts.
    `phase` is the phase of an intervention that began last; `written` is what the writer of each rank said.
    """

    outputs: list[Output] = field(default_factory=list)
    round_seconds: list[float] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    phase: str = ""
    written: dict[int, dict[str, Any]] = field(default_factory=dict)
    left_processes: int = 0
    left_shared_memory: dict[str, str] = field(default_factory=dict)
    gpu_memory: list[GpuMemory] = field(default_factory=list)


def finalise(folder: Path, heard: Heard, status: int, seconds: float) -> None:
    """Write the manifest of a run that reported everything.

    Args:
        folder: the capture.
        heard: what the source and the writers reported.
        status: exit status of the source.
        seconds: duration of the whole capture.

    Raises:
        LocalizerError: what the writer wrote was not there in time.
        OSError: the manifest cannot be written.
    """
    done, written = heard.done or {}, ranks.merged(heard.written)
    workers = done.get("workers", [])
    coverage = {
        site: Coverage(expected=expected, recorded=written["recorded"][site])
        for site, expected in written.get("expected", {}).items()
    }
    reasons = unfinished(heard.outputs) + incomplete_reasons(coverage, written, workers)
    reasons += done.get("errors", [])
    wait.for_shards(folder, written.get("journal", 0))
    capture = Capture(folder)  # without its manifest: what the journal lists
    if written:
        reasons += unaccounted(capture, heard.outputs)
        reasons += mistraced(capture, written.get("counts", {})) + apart(capture)
    processes = {
        "program": done,
        **ranks.named("writer", heard.written),
        **{f"worker-{rank}": worker for rank, worker in enumerate(workers)},
        **done.get("children", {}),
    }
    documents = [describe(folder, name) for name in (schema.OPEN, schema.JOURNAL, schema.LOG)]
    manifest = Manifest(
        format=schema.FORMAT,
        schema=schema.SCHEMA,
        state="incomplete" if reasons else "complete",
        reasons=reasons,
        outputs=heard.outputs,
        sites=[msgspec.convert(site, Site) for site in written.get("sites", [])],
        coverage=coverage,
        not_applicable=written.get("not_applicable", {}),
        untapped=written.get("untapped", {}),
        code=written.get("code", {}),
        counts={
            **written.get("counts", {}),
            **facts.counts(workers),
            "dummy_forwards": sum(worker["dummies"] for worker in workers),
            "left_processes": heard.left_processes,
            "left_shared_memory": len(heard.left_shared_memory),
            **(workers[0].get("taps", {}) if workers else {}),
            "exit_status": status,
            **({"writer_exit_status": written["exit_status"]} if "exit_status" in written else {}),
        },
        engine={**heard.engine, **(workers[0]["engine"] if workers else {}), "versions": heard.versions},
        durations={
            **done.get("durations", {}),
            **{name: used["seconds"] for name, used in processes.items() if "seconds" in used},
            "total": seconds,
        },
        round_seconds=heard.round_seconds,
        peak_memory_bytes={
            name: used["peak_memory"] for name, used in processes.items() if "peak_memory" in used
        },
        left_shared_memory=heard.left_shared_memory,
        gpu_memory=heard.gpu_memory,
        files=[*documents, *capture.files],
        config=masked(workers[0].get("config", {})) if workers else {},
        kv_contents=workers[0].get("kv_contents", {}) if workers else {},
        probes=facts.probes(workers),
        weights=facts.weights(workers),
        compiled=facts.compiled(workers),
        identity=facts.identities(capture.open, done),
        intervention=msgspec.convert(done.get("intervention"), Course | None),
    )
    tensors.replace(folder / schema.MANIFEST, schema.encode(manifest))


def incomplete_reasons(
    coverage: Mapping[str, Coverage], written: Mapping[str, Any], workers: list[dict[str, Any]]
) -> list[str]:
    """Why a finished run did not leave all it should have; empty if it did."""
    reasons = ranks.told([worker["errors"] for worker in workers])
    reasons += written.get("complaints", [])
    untapped = written.get("untapped", {})
    unread = workers[0].get("kv_contents", {}) if workers else {}
    if unread and all(layout.startswith(UNREAD) for layout in unread.values()):
        name, why = next(iter(unread.items()))
        reasons.append(f"the KV contents of no layer could be read, first {name}: {why}")
    if untapped:
        name, kind = next(iter(untapped.items()))
        reasons.append(f"{len(untapped)} layers have no tap yet, first {name} ({kind})")
    if "sites" in written and not written["sites"]:
        reasons.append("no site was recorded: none matches the patterns of --sites")
    short = {site: rows for site, rows in coverage.items() if rows.recorded != rows.expected}
    if short:
        site, rows = next(iter(short.items()))
        reasons.append(
            f"rows are missing at {len(short)} of {len(coverage)} sites, "
            f"first at {site}: {rows.recorded} of {rows.expected}"
        )
    counts = written.get("counts", {})
    if counts.get("rows_without_prefix"):
        reasons.append(
            f"{counts['rows_without_prefix']} rows have tokens before them that no row and no prompt gives"
        )
    if counts.get("prompt_mismatches"):
        reasons.append(
            f"{counts['prompt_mismatches']} rows have an input id that is not the prompt's token there"
        )
    return reasons


def describe(folder: Path, name: str) -> Shard:
    """The record of a file of a capture: its size and digest as they are now."""
    path = folder / name
    return Shard(name=name, size=path.stat().st_size, xxh3_128=tensors.file_digest(path))
