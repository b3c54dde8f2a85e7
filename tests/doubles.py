"""A double of vLLM for `localize run`: it writes synthetic captures (builders.py), no engine starts."""

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
from localizer.capture.request import CaptureRequest, prepare
from localizer.capture.session import Progress
from localizer.diff.result import Difference
from localizer.diff.runs import RunResult
from localizer.report import run as report
from localizer.run.config import Config
from localizer.run.pipeline import Pipeline
from localizer.store import names, runs, schema
from localizer.store.reader import Capture

QUERY = "r01.00", 4, attention(1, "query")
FAULT: dict[str, Any] = {"changes": {QUERY: bump()}}
OTHER_TOKEN: dict[str, Any] = {"outputs": {"r01.00": [9, 9, 9, 9]}}

OTHER_VERSION = "0.28.0"
"""A vLLM that is not the one of the other captures."""

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
    """The double: makes the capture that `makes` describes by name and by how often it was made.

    Beside fields of `builders.Plan`: `logprobs`, `blocks` of the KV cache, and `ignores`, that it takes no
    other number of them.
    """

    makes: Making
    made: list[str] = field(default_factory=list)
    requests: list[CaptureRequest] = field(default_factory=list)
    sources: dict[Path | None, schema.Open] = field(default_factory=dict)

    def __call__(self, request: CaptureRequest, progress: Progress) -> Path:
        self.requests.append(request)
        _, number = names.new_folder(request.root, request.name)
        more = dict(self.makes(request.name, number))
        (request.root / request.name / f"{number:04d}").rmdir()
        logprobs = more.pop("logprobs", {})
        own, ignores = more.pop("blocks", 64), more.pop("ignores", False)
        blocks = own if ignores else request.engine.get("num_gpu_blocks_override", own)
        plan = Plan(name=request.name, number=number, only_tokens=not request.taps)
        plan = replace(plan, running={"num_kv_blocks": blocks}, **more)
        if request.payload == "none":
            plan = replace(plan, payload=frozenset())
        folder = write(request.root, plan)
        _edit(folder, self.opening(request), request.taps, logprobs)
        self.made.append(request.name)
        return folder

    def opening(self, request: CaptureRequest) -> schema.Open:
        """What a real capture of the request would say of its source, looked up once."""
        if request.overlay not in self.sources:
            prepared = prepare(request)
            if prepared.laid is not None:
                prepared.laid.lock.close()
            self.sources[request.overlay] = prepared.opening
        return self.sources[request.overlay]


def _edit(folder: Path, real: schema.Open, taps: bool, logprobs: dict[str, list[Any]]) -> None:
    """Note what the builder does not: the source and the model, taps that are off, log probabilities."""
    opening = json.loads((folder / schema.OPEN).read_text())
    opening["observer"]["taps"] = taps
    if opening["source"]["vllm"] != OTHER_VERSION:
        opening["source"] = msgspec.to_builtins(real.source)
    for name in ("model", "draft"):
        opening["workload"][name] = msgspec.to_builtins(getattr(real.workload, name))
    (folder / schema.OPEN).write_text(json.dumps(opening, indent=1))
    if not (folder / schema.MANIFEST).exists():
        return
    manifest = json.loads((folder / schema.MANIFEST).read_text())
    for output in manifest["outputs"]:
        output["logprobs"] = logprobs.get(output["request"], [])
    for file in manifest["files"]:
        if file["name"] == schema.OPEN:
            file.update(msgspec.to_builtins(describe(folder, schema.OPEN)))
    (folder / schema.MANIFEST).write_text(json.dumps(manifest, indent=1))


def going(config: Config, folder: Path, vllm: Vllm, fresh: bool = False) -> tuple[RunResult, Nobody]:
    watcher = Nobody()
    pipeline = Pipeline(config, folder / "captures", folder, watcher, vllm, fresh)
    with pipeline.record as record:
        result = pipeline.run()
        kept = {form: io.StringIO() for form in ("text", "json")}
        for form, stream in kept.items():
            report.render(form, result, stream)
        record.finish(kept["json"].getvalue(), kept["text"].getvalue())
    return result, watcher


def text_of(folder: Path) -> str:
    return (runs.folders(folder / "captures")[-1] / runs.REPORT).read_text()


def candidates(**changes: Any) -> Making:
    """The same for every capture of the candidate, nothing for the parent's."""
    return lambda name, number: changes if name.startswith("candidate") else {}


class Broken(Exception):
    """In place of a power cut."""
