"""What is said of a capture's schedule, weights, compiled code and identity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from localizer.report.safe import clean
from localizer.store.reader import Capture
from localizer.store.trace import StepTrace
from localizer.wire.spec import UNREAD

GRAPHS_SHOWN = 5
"""Graph modes that are told; vLLM has fewer."""

CHANGED_SHOWN = 3
"""Files that are named before their number is."""


@dataclass(frozen=True)
class Schedule:
    """A summary of the schedule trace.

    Attributes:
        steps: how many were traced.
        most_requests, most_tokens: of one step.
        padding: rows of batch padding in all steps.
        cached: tokens taken from the prefix cache.
        drafts: draft tokens that were verified.
        resumed: how often a preempted request was scheduled again.
        graphs: steps by graph mode, the most frequent ones.
        kv_contents: steps whose keys and values were hashed.
    """

    steps: int
    most_requests: int
    most_tokens: int
    padding: int
    cached: int
    drafts: int
    resumed: int
    graphs: dict[str, int]
    kv_contents: int


def schedule(steps: Sequence[StepTrace]) -> dict[str, Any] | None:
    """The summary as plain data; None where there is no trace."""
    if not steps:
        return None
    tokens = [sum(step.scheduled) for step in steps]
    summary = Schedule(
        steps=len(steps),
        most_requests=max(len(step.requests) for step in steps),
        most_tokens=max(tokens),
        padding=sum(step.padded for step in steps) - sum(tokens),
        cached=sum(sum(step.cached) for step in steps),
        drafts=sum(sum(step.drafts) for step in steps),
        resumed=sum(len(step.resumed) for step in steps),
        graphs=dict(Counter(step.graph for step in steps).most_common(GRAPHS_SHOWN)),
        kv_contents=sum(bool(step.keys) for step in steps),
    )
    return asdict(summary)


def facts_lines(capture: Capture) -> Iterator[str]:
    """The lines of `localize show` about what a capture holds beside the tensors."""
    found = schedule(capture.steps)
    if found:
        graphs = ", ".join(f"{count:,} {clean(name)}" for name, count in found["graphs"].items())
        rest = [
            f"{found[key]:,} {text}"
            for key, text in (
                ("padding", "padding rows"),
                ("cached", "tokens from the prefix cache"),
                ("drafts", "draft tokens verified"),
                ("resumed", "resumptions"),
                ("kv_contents", "with KV contents"),
            )
            if found[key]
        ]
        yield (
            f"  schedule      {found['steps']:,} steps of at most {found['most_requests']:,} requests and "
            f"{found['most_tokens']:,} tokens; graph modes {graphs}" + "".join(f"; {text}" for text in rest)
        )
    manifest = capture.manifest
    if manifest is None:
        return
    unread = [(name, why) for name, why in manifest.kv_contents.items() if why.startswith(UNREAD)]
    if unread:
        name, why = unread[0]
        yield f"  KV contents   {len(unread)} layers lack them, first {clean(name)}: {clean(why)}"
    if manifest.weights is not None:
        weights = manifest.weights
        digest = f"{clean(weights.algorithm)} {clean(weights.digest)}"
        yield f"  weights       {len(weights.tensors):,} tensors, {digest}"
    if manifest.compiled is not None:
        compiled = manifest.compiled
        yield (
            f"  compiled      {clean(compiled.mode)} with {clean(compiled.backend)}, cache "
            f"{clean(compiled.cache)}, {len(compiled.files):,} generated files"
        )
    elif manifest.identity is not None:
        yield "  compiled      not compiled"
    identity = manifest.identity
    if identity is None:
        return
    python = identity.python
    changed = [clean(name) for name in python.changed[:CHANGED_SHOWN]]
    more = f" and {len(python.changed) - CHANGED_SHOWN} more" if len(python.changed) > CHANGED_SHOWN else ""
    yield (
        f"  loaded        {python.files:,} Python files of vLLM, {len(identity.native):,} native libraries; "
        + (f"not as installed: {', '.join(changed)}{more}" if changed else "all Python files as installed")
    )
    if identity.processor is not None:
        processor = identity.processor
        name, capability = clean(processor.model) or "unknown", clean(processor.capability)
        yield f"  processor     {name}, torch uses {capability} on {processor.threads:,} threads"
    for gpu in identity.gpus:
        cuda = f", CUDA {clean(gpu.cuda)}" if gpu.cuda else ""
        capability = f", compute capability {clean(gpu.capability)}" if gpu.capability else ""
        yield (
            f"  GPU           {clean(gpu.name)} {clean(gpu.uuid)}, driver {clean(gpu.driver) or 'unknown'}"
            f"{cuda}{capability}"
        )
    if identity.checkout is not None:
        checkout = identity.checkout
        state = {True: "with changes", False: "clean", None: "perhaps changed"}[checkout.dirty]
        yield f"  checkout      {clean(checkout.commit)}, {state}"
