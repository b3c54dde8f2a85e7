"""The commands that make captures like these again, quoted for a POSIX shell."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from localizer.report.safe import escaped
from localizer.store.reader import Capture
from localizer.store.schema import NOT_RECORDED
from localizer.store.scrub import OTHERS
from localizer.wire.spec import HOST

AMBIENT = frozenset({"PYTHONPATH", "VLLM_NO_USAGE_STATS", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", OTHERS})
"""Variables that localizer sets by itself, or that nobody can set again."""

CONTROLS_SHOWN = 4


def commands(captures: Mapping[str, Capture]) -> str:
    """A line for each capture, and the diff.

    Args:
        captures: candidate, parent and controls, in this order.
    """
    made = list(captures.values())
    python = len({capture.open.source.python for capture in made[:2]}) > 1
    order = [made[1], *made[2 : 2 + CONTROLS_SHOWN], made[0]]
    lines = [line(capture, python=python) for capture in order]
    names = [capture.open.name for capture in made[: 2 + CONTROLS_SHOWN]]
    diff = ["localize", "diff", *names[:2]]
    for name in names[2:]:
        diff += ["--control", name]
    return "\n".join([*lines, join(diff)])


def join(words: list[str]) -> str:
    """Words as one line that a shell takes apart again; what does not print is shown as escapes."""
    return shlex.join(map(escaped, words))


def line(capture: Capture, *, python: bool = False) -> str:
    """The command that makes a capture again; `python`: with the source's interpreter."""
    if capture.open.intervention is not None:
        return (
            f"# {escaped(capture.open.name)} is of localize intervene, whose patches are not in the archive"
        )
    return join(["localize", "capture", capture.open.name, *_options(capture, python)])


def _options(capture: Capture, python: bool) -> Iterator[str]:
    source, work, seen = capture.open.source, capture.open.workload, capture.open.observer
    yield from ("--model", work.model.name)
    if python:
        yield from ("--python", source.python)
    if source.overlay is not None:
        git = source.overlay.git
        yield from (
            ("--overlay", source.overlay.path) if git is None else ("--git", f"{git.repository}@{git.commit}")
        )
    yield from ("--matrix", ",".join(map(str, work.matrix)), "--repeats", str(work.repeats))
    yield from ("--prompt-tokens", str(work.prompt_tokens), "--max-tokens", str(work.max_tokens))
    yield from ("--seed", str(work.seed))
    if isinstance(work.sampling.get("logprobs"), int):
        yield from ("--logprobs", str(work.sampling["logprobs"]))
    if not seen.taps:
        yield "--no-taps"
    else:
        yield from ("--layers", seen.layers, "--payload", seen.payload)
        if seen.level != "boundary":
            yield from ("--level", seen.level)
        for option, values, default in (
            ("--sites", seen.sites, ("*",)),
            ("--rows", seen.rows, ("all",)),
            ("--transactions", (seen.transactions,), ("all",)),
            ("--probe", seen.probes, ()),
        ):
            for value in values if values != default else ():
                yield from (option, value)
        if not seen.weights:
            yield "--no-weight-digests"
        if seen.kv_contents:
            yield "--kv-contents"
        if seen.row_digest != HOST:
            yield from ("--row-digest", seen.row_digest)
        if seen.digest_split != 1:
            yield from ("--digest-split", str(seen.digest_split))
        if seen.graph_rows is not None:
            yield from ("--graph-rows", str(seen.graph_rows))
        if seen.graph_memory is not None:
            yield from ("--graph-memory", str(-(-seen.graph_memory >> 20)))  # whole MiB, rounded up
    engine = dict(work.engine)
    speculative = engine.pop("speculative_config", None)
    for key, value in engine.items():
        if value != NOT_RECORDED:
            yield from ("--engine", f"{key}={_value(value)}")
    if isinstance(speculative, dict):
        if work.draft is not None:
            yield from ("--speculative-model", work.draft.name)
        for key, value in speculative.items():
            if key != "model" or work.draft is None:
                yield from ("--speculative", f"{key}={_value(value)}")
    for key, value in capture.open.environment.items():
        if key not in AMBIENT and value != NOT_RECORDED:
            yield from ("--env", f"{key}={value}")


def _value(value: Any) -> str:
    """A value as `--engine` reads it: text as it is unless it would be read as JSON."""
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        json.loads(value)
    except ValueError:
        return value
    return json.dumps(value)
