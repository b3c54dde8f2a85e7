"""From the remains of a failed source to the likely cause, in a sentence."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localizer.wire import unsupported

TAIL_LINES = 12

_PATTERNS = (
    (r"No space left on device", "the disk is full; free some space or name another folder with --out"),
    (r"UnknownLayout: ([^\n]+)", "{0}; capture a version localizer was seen on, or report this layout"),
    (r"CannotTap: ([^\n]+)", "{0}"),
    (r"MultiModalProcessor requires a tokenizer", unsupported.MULTIMODAL),
    (r"only supported for generative models", unsupported.POOLING),
    (r"operator torchvision::nms does not exist", "torchvision does not fit torch; uninstall torchvision"),
    (r"unexpected keyword argument '([^']+)'", "vLLM has no engine argument {0!r}; check --engine"),
    (r"(?:No module named|cannot import name) '([^']+)'", "the source lacks {0!r}; check its interpreter"),
    (r"validation errors? for (\w+)[\s\S]*?\n\s+(.+?) \[type=",
     "vLLM refused an engine argument: {1}; check --engine"),
    (r"[Mm]emory on node .* (?:is less than|than requested)|out of memory|OutOfMemory|Cannot allocate memory",
     "there is not enough memory; lower it with --engine gpu_memory_utilization=... or "
     "kv_cache_memory_bytes=..."),
    (r"Not enough allowed NUMA nodes",
     "vLLM gives each worker on the CPU a NUMA node of its own, and there are fewer; "
     "name the cores of each instead, such as --env 'VLLM_CPU_OMP_THREADS_BIND=0|1'"),
    (r"Repo id must|not a valid model identifier|LocalEntryNotFound|couldn't connect|MaxRetry|OfflineMode",
     "the model could not be fetched; name a local folder with --model"),
    (r"Python\.h|No C\+\+ compiler|InvalidCxxCompiler", "no C++ compiler works; install one (g++)"),
)  # fmt: skip
"""Regular expressions over the end of the log, and what they mean."""


_EXCEPTION = re.compile(
    r"(?:^|.* ERROR .*?\] +)((?:\w+\.)*\w*(?:Error|Exception|UnknownLayout|CannotTap): .+)"
)
"""A line that ends a traceback, as Python prints it or inside a line that vLLM logs as an error."""

_DIED = re.compile(r"(\S+) died unexpectedly")

_CONSEQUENCE = re.compile(r"[Rr]oot cause|[Ss]ee stack trace|Failed core proc|died unexpectedly|: cancelled$")
"""Exceptions that only report that another process failed first."""


def last_lines(log: Path, count: int = TAIL_LINES) -> list[str]:
    """The last non-empty lines of a log, without control characters."""
    with log.open("rb") as handle:
        handle.seek(max(0, log.stat().st_size - 65536))
        text = handle.read().decode("utf-8", "replace")
    lines = [
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]", "", line).rstrip()
        for line in text.splitlines()
    ]
    return [line for line in lines if line][-count:]


REFUSALS = ("CannotTap", "UnknownLayout")
"""Exceptions by which localizer's own code refuses a source; their texts say all there is to say."""


def is_refusal(log: Path, error: Mapping[str, Any] | None) -> bool:
    """Whether localizer's own code in the source refused to observe it."""
    return _reported(log, error).partition(":")[0].rpartition(".")[2] in REFUSALS


def likely_cause(log: Path, error: Mapping[str, Any] | None, status: int | None) -> str:
    """Why the source ended, as far as its log, its error report and its exit status tell.

    One sentence without a full stop.
    """
    if shutil.disk_usage(log.parent).free < 1 << 20:
        return _PATTERNS[0][1]
    if error is None and status is not None and status < 0:
        return f"it was ended by signal {-status}"
    cause = _reported(log, error)
    for pattern, meaning in _PATTERNS:
        known = re.search(pattern, cause)
        if known:
            return meaning.format(*known.groups())
    return cause.strip().splitlines()[0].rstrip(".") if cause.strip() else "its log does not say"


def _reported(log: Path, error: Mapping[str, Any] | None) -> str:
    """The exception that ended the source: the one it reported, or behind that the first in its log."""
    cause = "" if error is None else f"{error.get('type')}: {error.get('message', '')}".removeprefix(": ")
    if not cause or _CONSEQUENCE.search(cause):
        lines = last_lines(log, 2000)
        causes = [
            line[1] for line in map(_EXCEPTION.match, lines) if line and not _CONSEQUENCE.search(line[1])
        ]
        causes += [f"the process {line[1]} died" for line in map(_DIED.search, lines) if line]
        cause = causes[0] if causes else cause
    return cause
