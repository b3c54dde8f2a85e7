"""Settings that two captures record differently: arguments, environment, versions, files, what ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import xxhash

from localizer.diff.result import Difference
from localizer.store.reader import Capture
from localizer.store.schema import Manifest, Weights

WEIGHTS_NAMED = 5
"""Weights that are named one by one."""

_ABSENT = object()


def differences(candidate: Capture, parent: Capture) -> list[Difference]:
    """Every recorded setting that is not the same, by dotted name."""
    found = unequal(settings(candidate), settings(parent))
    left, right = candidate.manifest, parent.manifest
    if left is None or right is None:
        return found
    if candidate.open.observer.ranks == parent.open.observer.ranks:  # else each holds other parts of them
        found += weights(left.weights, right.weights)
    ours, theirs = facts(left), facts(right)
    for section in [section for section in ours if section in theirs]:  # not knowing is no difference
        here, there = flat({section: ours[section]}), flat({section: theirs[section]})
        if section == "config" and candidate.open.source.vllm != parent.open.source.vllm:
            here = {name: value for name, value in here.items() if name in there}
            there = {name: value for name, value in there.items() if name in here}  # versions add fields
        found += [item for item in unequal(here, there) if not _told(item, found)]
    return found


def unequal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """What two flat tables do not share, in the order of the first."""
    return [
        Difference(setting=name, candidate=ours.get(name), parent=theirs.get(name))
        for name in [*ours, *(name for name in theirs if name not in ours)]
        if ours.get(name, _ABSENT) != theirs.get(name, _ABSENT)
    ]


def _told(item: Difference, found: list[Difference]) -> bool:
    """Whether a difference only repeats a setting of the same name, as the resolved configuration does."""
    name = item.setting.rpartition(".")[2]
    return any(
        known.setting.rpartition(".")[2] == name
        and (known.candidate, known.parent) == (item.candidate, item.parent)
        for known in found
    )


def settings(capture: Capture) -> dict[str, Any]:
    """The settings of a capture as one flat table."""
    facts = capture.open
    source = msgspec.to_builtins(facts.source)
    overlay = source.pop("overlay")
    work = facts.workload
    tree: dict[str, Any] = {
        "source": source,
        "git": {"commit": overlay["git"]["commit"]} if overlay and overlay["git"] else {},
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
        "intervention": {} if facts.intervention is None else msgspec.to_builtins(facts.intervention),
        "localizer": facts.localizer,
    }
    if capture.manifest is not None:
        tree["running"] = capture.manifest.engine
    return flat(tree)


def facts(manifest: Manifest) -> dict[str, Any]:
    """What was found out about the run beside its settings, by section; no section that was not recorded."""
    found: dict[str, Any] = {}
    if manifest.identity is not None:
        found["identity"] = msgspec.to_builtins(manifest.identity)
        found["identity"]["python"].pop("files")  # the digest is over all of them
        found["compiled"] = {}
        if manifest.compiled is not None:
            compiled = msgspec.to_builtins(manifest.compiled)
            compiled.pop("counters")
            found["compiled"] = compiled | {"files": _summary(manifest.compiled.files)}
    if manifest.config:
        found["config"] = manifest.config
    return found


def _summary(files: Mapping[str, str]) -> str:
    """Many files in a few words: how many, and a digest of their names and digests."""
    listed = "".join(f"{name} {files[name]}\n" for name in sorted(files))
    return f"{len(files)} files, {xxhash.xxh3_64_hexdigest(listed.encode())}"


def weights_equal(candidate: Capture, parent: Capture) -> bool | None:
    """Whether both loaded weights of equal digests; None where one does not say, or splits them otherwise."""
    manifests = candidate.manifest, parent.manifest
    left, right = (None if manifest is None else manifest.weights for manifest in manifests)
    if left is None or right is None or left.algorithm != right.algorithm:
        return None
    if candidate.open.observer.ranks != parent.open.observer.ranks:
        return None
    return left.tensors == right.tensors


def weights(candidate: Weights | None, parent: Weights | None) -> Iterator[Difference]:
    """That the loaded weights differ, and the first of them; nothing where they are equal or not known."""
    if candidate is None or parent is None or candidate.algorithm != parent.algorithm:
        return
    ours, theirs = candidate.tensors, parent.tensors
    different = unequal(ours, theirs)
    if not different:
        return
    total = len(ours.keys() | theirs.keys())
    yield Difference(
        setting="loaded weights",
        candidate=f"{candidate.digest}, {len(different)} of {total} tensors differ",
        parent=parent.digest,
    )
    for item in different[:WEIGHTS_NAMED]:
        yield msgspec.structs.replace(item, setting=f"loaded weights.{item.setting}")


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of settings as one table by dotted names."""
    found: dict[str, Any] = {}
    _flatten("", tree, found)
    return found


def _flatten(prefix: str, value: Any, into: dict[str, Any], depth: int = 0) -> None:
    if isinstance(value, Mapping) and depth < 20:
        for key, item in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), item, into, depth + 1)
    else:
        into[prefix] = value
