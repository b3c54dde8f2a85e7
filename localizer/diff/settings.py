"""Settings that two captures record differently: engine arguments, environment, versions, overlay files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from localizer.diff.result import Difference
from localizer.store.reader import Capture


def differences(candidate: Capture, parent: Capture) -> list[Difference]:
    """Every recorded setting that is not the same, by dotted name."""
    ours, theirs = settings(candidate), settings(parent)
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [
        Difference(setting=name, candidate=ours.get(name), parent=theirs.get(name))
        for name in names
        if (name in ours) != (name in theirs) or ours.get(name) != theirs.get(name)
    ]


def settings(capture: Capture) -> dict[str, Any]:
    """The settings of a capture as one flat table."""
    facts = capture.open
    source = msgspec.to_builtins(facts.source)
    overlay = source.pop("overlay")
    work = facts.workload
    tree: dict[str, Any] = {
        "source": source,
        "overlay": overlay["files"] if overlay else {},
        "model": {"name": work.model.name, "files": work.model.files},
        "draft": {} if work.draft is None else {"name": work.draft.name, "files": work.draft.files},
        "workload": {
            "matrix": work.matrix,
            "repeats": work.repeats,
            "prompt_tokens": work.prompt_tokens,
            "max_tokens": work.max_tokens,
            "seed": work.seed,
        },
        "sampling": work.sampling,
        "engine": work.engine,
        "environment": facts.environment,
        "host": facts.host,
        "observer": msgspec.to_builtins(facts.observer),
        "localizer": facts.localizer,
    }
    if capture.manifest is not None:
        tree["running"] = capture.manifest.engine
    flat: dict[str, Any] = {}
    _flatten("", tree, flat)
    return flat


def _flatten(prefix: str, value: Any, into: dict[str, Any], depth: int = 0) -> None:
    if isinstance(value, Mapping) and depth < 20:
        for key, item in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), item, into, depth + 1)
    else:
        into[prefix] = value
