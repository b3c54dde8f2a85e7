"""From what the source's processes told of themselves to the records of a manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from localizer.sources import identity
from localizer.store.schema import DIGEST_BYTES, Compiled, Gpu, Identity, Open, Probe, Processor, Weights


def weights(workers: Sequence[Mapping[str, Any]]) -> Weights | None:
    """The digests of the weights that the workers loaded: of several each one's, by name and rank."""
    found = [worker.get("weights") for worker in workers]
    told = [msgspec.convert(weights, Weights) for weights in found if weights is not None]
    if not told or len(told) < len(workers):
        return None
    if len(told) == 1:
        return told[0]
    tensors = {
        f"{name}@{rank}/{len(told)}": digest
        for rank, one in enumerate(told)
        for name, digest in one.tensors.items()
    }
    listed = "".join(f"{name} {tensors[name]}\n" for name in sorted(tensors))
    digest = blake2b(listed.encode(), digest_size=DIGEST_BYTES).hexdigest()
    return Weights(algorithm=told[0].algorithm, digest=digest, tensors=tensors)


def compiled(workers: Sequence[Mapping[str, Any]]) -> Compiled | None:
    """How the first worker compiled its model, with the digests of the generated files."""
    found = workers[0].get("compiled") if workers else None
    if found is None:
        return None
    return msgspec.convert({**found, "files": identity.digests(found["files"])}, Compiled)


def counts(workers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What was counted in the steps of all workers: metadata builds, forwards by graph mode."""
    total: Counter[str] = Counter()
    for worker in workers:
        total.update(worker.get("counts", {}))
    return dict(total)


def probes(workers: Sequence[Mapping[str, Any]]) -> list[Probe]:
    """The calls of each probe's function in all workers."""
    several = [msgspec.convert(worker.get("probes", []), list[Probe]) for worker in workers]
    found = []
    for same in zip(*several, strict=True):
        hits = [probe.hits for probe in same]
        found.append(
            msgspec.structs.replace(
                same[0],
                calls=sum(probe.calls for probe in same),
                hits=None if None in hits else sum(filter(None, hits)),
                calls_outside_steps=sum(probe.calls_outside_steps for probe in same),
            )
        )
    return found


def identities(opening: Open, done: Mapping[str, Any]) -> Identity | None:
    """What really ran, in the program and in its workers; None if nothing was told."""
    workers = done.get("workers", [])
    told = [loaded for teller in (done, *workers) if (loaded := teller.get("loaded"))]
    if not told:
        return None
    native = {name: path for loaded in told for name, path in loaded["native"].items()}
    python = {name: path for loaded in told for name, path in loaded["python"].items()}
    hardware = [found for worker in workers if (found := worker.get("hardware"))]
    source = opening.source
    installed = Path(source.vllm_location)
    return Identity(
        native=identity.digests(native),
        python=identity.imported(python, installed),
        processor=msgspec.convert(hardware[0]["processor"], Processor) if hardware else None,
        gpus=[msgspec.convert(gpu, Gpu) for found in hardware for gpu in found["gpus"]],
        checkout=identity.checkout(installed if source.overlay is None else Path(source.overlay.path)),
    )
