"""A double of vLLM for runs: it writes synthetic captures (builders.py) in place of starting an engine."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from builders import Plan, attention, bump, write

from localizer.capture.finish import describe
from localizer.capture.request import CaptureRequest
from localizer.capture.session import Progress
from localizer.diff.result import Difference
from localizer.diff.runs import RunResult
from localizer.report import run as report
from localizer.run.config import Config, load
from localizer.run.pipeline import Pipeline
from localizer.store import names, schema
from localizer.store.reader import Capture

QUERY = "r01.00", 4, attention(1, "query")
FAULT: dict[str, Any] = {"changes": {QUERY: bump()}}
OTHER_TOKEN: dict[str, Any] = {"outputs": {"r01.00": [9, 9, 9, 9]}}

Making = Callable[[str, int], dict[str, Any]]


class Nobody:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def tell(self, text: str) -> None:
        self.said.append(text)

    def differences(self, found: Any) -> None:
        self.found: list[Difference] = list(found)

    def capture(self, name: str) -> Progress:
        self.said.append(name)
        return self  # type: ignore[return-value]

    def captured(self, capture: Capture) -> None: ...


@dataclass
class Vllm:
    """The double: makes the capture that `makes` describes by name and by how often it was made."""

    makes: Making
    made: list[str] = field(default_factory=list)
    requests: list[CaptureRequest] = field(default_factory=list)

    def __call__(self, request: CaptureRequest, progress: Progress) -> Path:
        self.requests.append(request)
        _, number = names.new_folder(request.root, request.name)
        (request.root / request.name / f"{number:04d}").rmdir()
        more = dict(self.makes(request.name, number))
        logprobs = more.pop("logprobs", {})
        blocks = request.engine.get("num_gpu_blocks_override", more.pop("blocks", 64))
        overlay = {"models/llama.py": "11" * 16} if request.overlay else None
        plan = Plan(name=request.name, number=number, only_tokens=not request.taps, overlay=overlay)
        plan = replace(plan, running={"num_kv_blocks": blocks}, **more)
        if request.payload == "none":
            plan = replace(plan, payload=frozenset())
        folder = write(request.root, plan)
        _edit(folder, request.taps, logprobs)
        self.made.append(request.name)
        return folder


def _edit(folder: Path, taps: bool, logprobs: dict[str, list[Any]]) -> None:
    """Note what the builder does not: taps that are off, and log probabilities."""
    opening = json.loads((folder / schema.OPEN).read_text())
    opening["observer"]["taps"] = taps
    (folder / schema.OPEN).write_text(json.dumps(opening, indent=1))
    manifest = json.loads((folder / schema.MANIFEST).read_text())
    for output in manifest["outputs"]:
        output["logprobs"] = logprobs.get(output["request"], [])
    for file in manifest["files"]:
        if file["name"] == schema.OPEN:
            file.update(msgspec.to_builtins(describe(folder, schema.OPEN)))
    (folder / schema.MANIFEST).write_text(json.dumps(manifest, indent=1))


def configured(folder: Path) -> Config:
    """Both sources the installed vLLM, the candidate with a changed file."""
    changed = folder / "overlay" / "vllm" / "extra.py"
    changed.parent.mkdir(parents=True)
    changed.write_text("")
    text = (
        '[workload]\nmodel = "tiny"\n[candidate]\noverlay = "overlay"\n[engine]\nenforce_eager = true\n'
        "kv_cache_memory_bytes = 268435456\n"
    )
    (folder / "localize.toml").write_text(text)
    return load(folder / "localize.toml")


def going(config: Config, folder: Path, vllm: Vllm, fresh: bool = False) -> tuple[RunResult, Nobody]:
    watcher = Nobody()
    pipeline = Pipeline(config, folder / "captures", folder, watcher, vllm, fresh)
    result = pipeline.run()
    kept = {form: io.StringIO() for form in ("text", "json")}
    for form, stream in kept.items():
        report.render(form, result, stream)
    pipeline.record.finish(kept["json"].getvalue(), kept["text"].getvalue())
    return result, watcher
