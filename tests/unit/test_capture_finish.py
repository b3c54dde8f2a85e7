"""The manifest says what was heard; a run that left less than it should have is incomplete, with reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import Plan, write

from localizer.capture.finish import Heard, finalise, incomplete_reasons
from localizer.errors import LocalizerError
from localizer.report.captures import left
from localizer.store.reader import Capture
from localizer.store.schema import Coverage, GpuMemory, Output
from localizer.store.verify import verify

WORKER = {"errors": [], "dummies": 3, "peak_memory": 7, "engine": {"dtype": "bfloat16"}}


def written(**changes: Any) -> dict[str, Any]:
    counts = {"steps": 1, "rows": 2, "logit_rows": 1, "rows_without_prefix": 0, "prompt_mismatches": 0}
    return {"counts": counts, "complaints": []} | changes


@pytest.mark.parametrize(
    ("coverage", "report", "workers", "says"),
    [
        ({}, written(), [WORKER], []),
        ({"a": Coverage(expected=2, recorded=2)}, written(), [WORKER], []),
        (
            {"a": Coverage(expected=2, recorded=2), "b": Coverage(expected=2, recorded=1)},
            written(),
            [WORKER],
            ["rows are missing at 1 of 2 sites, first at b: 1 of 2"],
        ),
        ({}, written(complaints=["the last step was cut off"]), [WORKER], ["the last step was cut off"]),
        ({}, written(), [WORKER | {"errors": ["it broke"]}], ["it broke"]),
        ({}, written(counts={"rows_without_prefix": 2}), [], ["2 rows have tokens before them"]),
        ({}, written(counts={"prompt_mismatches": 1}), [], ["1 rows have an input id"]),
        ({}, written(untapped={"m.3": "Mixer"}), [], ["1 layers have no tap yet, first m.3 (Mixer)"]),
        (
            {},
            written(),
            [WORKER | {"kv_contents": {"m.0": "not read: it has no cache group", "m.1": "not read: so"}}],
            ["the KV contents of no layer could be read, first m.0: not read: it has no cache group"],
        ),
        ({}, written(), [WORKER | {"kv_contents": {"m.0": "cpu-vec", "m.1": "not read: so"}}], []),
        ({}, written(sites=[]), [], ["no site was recorded: none matches"]),
        ({}, {}, [], []),
    ],
)
def test_reasons(
    coverage: dict[str, Coverage], report: dict[str, Any], workers: list[dict[str, Any]], says: list[str]
) -> None:
    reasons = incomplete_reasons(coverage, report, workers)
    assert len(reasons) == len(says)
    assert all(reason.startswith(said) for reason, said in zip(reasons, says, strict=True))


def test_the_manifest_makes_a_sound_capture(tmp_path: Path) -> None:
    folder = write(tmp_path, Plan(manifest=False))
    killed = Capture(folder)
    present = killed.table.recorded().tolist()
    rows = {site.name: int(count) for site, count in zip(killed.sites, present, strict=True)}
    sites = [
        {"name": site.name, "rows": site.rows, "dtype": site.dtype, "shape": list(site.shape or ())}
        for site in killed.sites
    ]
    outputs = [
        Output(request=name, internal=name, external="0", tokens=tokens, finish="length", cached_tokens=0)
        for name, tokens in killed.outputs.items()
    ]
    heard = Heard(
        outputs=outputs,
        versions={"vllm": "1.0"},
        done={
            "workers": [WORKER],
            "durations": {"load": 1.5},
            "peak_memory": 5,
            "seconds": 4.0,
            "children": {"EngineCore": {"peak_memory": 8, "seconds": 3.0}},
        },
        left_processes=1,
        left_shared_memory={"psm_1": "removed"},
        written={
            0: written(sites=sites, expected=rows, recorded=rows, peak_memory=6, not_applicable={"x": "no"})
        },
    )
    finalise(folder, heard, 0, 2.5)
    assert verify(folder).state == "sound"
    manifest = Capture(folder).manifest
    assert manifest is not None
    assert manifest.peak_memory_bytes == {"program": 5, "writer": 6, "worker-0": 7, "EngineCore": 8}
    assert manifest.durations == {"load": 1.5, "total": 2.5, "program": 4.0, "EngineCore": 3.0}
    assert manifest.engine == {"dtype": "bfloat16", "versions": {"vllm": "1.0"}}
    assert (manifest.counts["dummy_forwards"], manifest.counts["exit_status"]) == (3, 0)
    assert (manifest.counts["left_processes"], manifest.counts["left_shared_memory"]) == (1, 1)
    assert manifest.left_shared_memory == {"psm_1": "removed"}
    assert left(manifest) == [
        "processes of the run that would not end: 1", "the run left shared memory: psm_1 (removed)"
    ]  # fmt: skip
    assert manifest.not_applicable == {"x": "no"}


def test_what_the_writer_wrote_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALIZER_FILE_WAIT", "0")
    folder = write(tmp_path, Plan(manifest=False))
    size = (folder / "journal.jsonl").stat().st_size
    heard = Heard(done={"workers": []}, written={0: written(journal=size + 1)})
    with pytest.raises(LocalizerError, match=r"lacks journal.jsonl after 0 seconds"):
        finalise(folder, heard, 0, 1.0)
    assert not (folder / "manifest.json").exists()


def test_memory_that_is_left_on_a_gpu_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path, Plan(manifest=False))
    memory = [GpuMemory(uuid="a", before=1 << 20, after=3 << 30), GpuMemory(uuid="b", before=9, after=8)]
    finalise(folder, Heard(gpu_memory=memory, done={"errors": ["it ended early"]}), 0, 1.0)
    manifest = Capture(folder).manifest
    assert manifest is not None
    assert manifest.gpu_memory == memory
    assert left(manifest) == [
        "on GPU a 3,071 MiB more are in use than before the run: left by it, or taken by another program"
    ]
