"""What is installed and would a capture work: facts of an interpreter and of this machine, and findings.

`ask` has the interpreter import what a capture needs; `judge` makes findings of its answer and of the
machine, as data. The wording is in `localizer.report.doctor`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import localizer
from localizer.sources.machine import Machine, look
from localizer.wire.spec import EXAMINE
from localizer.wire.versions import is_seen, seen_on

FINE, WARNING, FAILURE = "fine", "warning", "failure"
"""All is well; something does not work or is not known to; a capture would not work."""

IMPORT_SECONDS = 300.0
"""How long importing everything may take; the first time it took 26 seconds on a laptop's disk."""

LITTLE_DISK, NO_DISK = 1 << 30, 64 << 20
LITTLE_SHARED_MEMORY = 64 << 20
OLDEST_PYTHON = (3, 10)
MEMORY_SHARE = 0.9
"""Share of the memory that vLLM claims on the CPU, where it does not say."""


@dataclass(frozen=True)
class Finding:
    """What was found out about one thing; `code` says what, `facts` with which names and numbers."""

    check: str
    state: str
    code: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What an interpreter said.

    Attributes:
        executable: empty where there is no such interpreter.
        facts: by step, of those that went well.
        errors: by step, of those that did not; the step during which the interpreter ended, too.
    """

    executable: str
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


def examine(python: str, root: Path, cache: Path, environment: Mapping[str, str]) -> list[Finding]:
    """Everything about a source's interpreter, and captures of it in `root` on this machine."""
    answer = ask(python, environment)
    include = str(answer.facts.get("python", {}).get("include", ""))
    return list(judge(python, answer, look(root, cache, include, environment), environment))


# -- asking ----------------------------------------------------------------------------------------------


def ask(python: str, environment: Mapping[str, str], seconds: float = IMPORT_SECONDS) -> Answer:
    """Have an interpreter import what a capture needs, in a process of its own."""
    executable = shutil.which(python)
    if executable is None:
        return Answer("")
    with tempfile.TemporaryDirectory(prefix="localizer-") as scratch:
        (Path(scratch) / "localizer").symlink_to(Path(localizer.__file__).parent)
        answers = Path(scratch) / "answers"
        path = os.pathsep.join(filter(None, (scratch, environment.get("PYTHONPATH", ""))))
        ending = _run(
            [executable, "-m", EXAMINE, str(answers)],
            {**environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            seconds,
        )
        text = answers.read_text(errors="replace") if answers.exists() else ""
    facts: dict[str, Mapping[str, Any]] = {}
    errors: dict[str, str] = {}
    begun = "start"
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            told = json.loads(line)
            begun = "" if "facts" in told or "error" in told else told["step"]
            if "facts" in told:
                facts[told["step"]] = told["facts"]
            elif "error" in told:
                errors[told["step"]] = str(told["error"])
    if begun and ending:
        errors[begun] = ending
    return Answer(executable, facts, errors)


def _run(command: list[str], environment: Mapping[str, str], seconds: float) -> str:
    """Run to the end or for so long; why it did not end well, or nothing."""
    try:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return str(error.strerror or error)
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"it took longer than {seconds:g} seconds"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode < 0:
        return f"it was ended by signal {-process.returncode}"
    lines = said.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
    return lines[-1] if process.returncode else ""


# -- judging ---------------------------------------------------------------------------------------------


def judge(python: str, answer: Answer, machine: Machine, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Findings, one for each thing, in the order in which a person would put them right."""
    yield Finding(
        "system",
        FINE if machine.system == "Linux" else FAILURE,
        "linux" if machine.system == "Linux" else "other-system",
        {"system": machine.system, "release": machine.release},
    )
    yield from _interpreter(python, answer)
    yield from _packages(answer)
    if "vllm" in answer.facts:
        yield from _vllm(answer, machine)
    if "python" in answer.facts:
        yield from _compiling(machine)
    yield from _storage(machine)
    yield from _memories(answer, machine, environment)


def _interpreter(python: str, answer: Answer) -> Iterator[Finding]:
    facts = answer.facts.get("python")
    if not answer.executable:
        yield Finding("python", FAILURE, "no-interpreter", {"python": python})
    elif "start" in answer.errors or facts is None:
        error = answer.errors.get("start") or answer.errors.get("python", "it said nothing")
        yield Finding("python", FAILURE, "unusable", {"python": answer.executable, "error": error})
    else:
        version = tuple(int(part) for part in str(facts["version"]).split(".")[:2])
        found = {"python": answer.executable, "version": facts["version"]}
        old = version < OLDEST_PYTHON
        yield Finding(
            "python",
            FAILURE if old else FINE,
            "too-old" if old else "found",
            found | {"oldest": ".".join(map(str, OLDEST_PYTHON))},
        )


def _packages(answer: Answer) -> Iterator[Finding]:
    """What was imported, or not; nothing about packages that were not reached, or that vLLM would bring."""
    if _is_missing(answer, "vllm"):
        yield Finding("vllm", FAILURE, "missing", {"python": answer.executable})
        return
    extras = answer.facts.get("extras", {}).get("errors", {})
    broken = {name: error for name, error in extras.items() if error}
    if "extras" in answer.errors:
        facts = {"python": answer.executable, "error": answer.errors["extras"]}
        yield Finding("torchvision", FAILURE, "crash", facts)
    elif broken:
        # vLLM imports transformers, which imports torchvision where it is installed
        state = FAILURE if {"transformers", "vllm"} & set(answer.errors) else WARNING
        reason = next(iter(broken.values()))
        conflict = {"python": answer.executable, "packages": list(broken), "error": reason}
        yield Finding("torchvision", state, "conflict", conflict)
    elif "extras" in answer.facts:
        code = "imported" if extras else "absent"
        yield Finding("torchvision", FINE, code, {"packages": list(extras)})
    for name in ("numpy", "torch", "transformers", "vllm"):
        if name in answer.errors:
            code = "missing" if _is_missing(answer, name) else "entailed" if broken else "broken"
            facts = {"python": answer.executable, "package": name, "error": answer.errors[name]}
            yield Finding(name, FAILURE, code, facts)
        elif name in answer.facts and name != "vllm":
            yield Finding(name, FINE, "imported", {"package": name, "version": answer.facts[name]["version"]})


def _is_missing(answer: Answer, name: str) -> bool:
    error = answer.errors.get(name, "")
    return error.startswith("ModuleNotFoundError") and error.endswith(f"'{name}'")


def _vllm(answer: Answer, machine: Machine) -> Iterator[Finding]:
    facts = answer.facts["vllm"]
    device, version = str(facts["platform"]), str(facts["version"])
    gpus = answer.facts.get("torch", {}).get("gpus", [])
    known = {"version": version, "location": facts["location"], "platform": device}
    yield Finding("vllm", FINE, "imported", known)
    seen = is_seen(version, device)
    yield Finding(
        "version",
        FINE if seen else WARNING,
        "seen" if seen else "untested",
        known | {"seen": list(seen_on(device))},
    )
    for problem in facts["problems"]:
        yield Finding("layout", FAILURE, "unknown", known | {"problem": problem})
    if not facts["problems"]:
        yield Finding("layout", FINE, "known", known)
    if not device:
        yield Finding("gpu", FAILURE, "no-device", known | {"driver": machine.gpu_driver})
    elif device == "cpu":
        code = "cpu-build" if machine.gpu_driver else "cpu"
        yield Finding("gpu", FINE, code, known)
    elif gpus:
        yield Finding("gpu", FINE, "found", known | {"gpus": gpus})
    else:
        yield Finding("gpu", WARNING, "not-seen", known)
    if facts["triton"]:
        yield Finding("triton", FINE, "usable", known)
    else:
        cpu = device == "cpu"
        yield Finding("triton", FINE if cpu else WARNING, "unused" if cpu else "unusable", known)


def _compiling(machine: Machine) -> Iterator[Finding]:
    if not machine.compiler:
        yield Finding("compiler", WARNING, "missing")
    elif machine.headers_error:
        facts = {"compiler": machine.compiler, "error": machine.headers_error}
        code = "no-headers" if "Python.h" in machine.headers_error else "broken"
        yield Finding("compiler", WARNING, code, facts)
    else:
        yield Finding("compiler", FINE, "works", {"compiler": machine.compiler})


def _storage(machine: Machine) -> Iterator[Finding]:
    for name, (folder, free, writable) in machine.disks.items():
        serious = FAILURE if name == "captures" else WARNING
        facts = {"folder": folder, "free": free, "wanted": LITTLE_DISK}
        if not writable:
            yield Finding(name, serious, "not-writable", facts)
        elif free < LITTLE_DISK:
            yield Finding(name, serious if free < NO_DISK else WARNING, "little-space", facts)
        else:
            yield Finding(name, FINE, "space", facts)


def _memories(answer: Answer, machine: Machine, environment: Mapping[str, str]) -> Iterator[Finding]:
    if machine.memory_file:
        yield Finding("ring", FAILURE, "no-memory-files", {"error": machine.memory_file})
    else:
        yield Finding("ring", FINE, "memory-files")
    if machine.shared_memory is None or machine.shared_memory < LITTLE_SHARED_MEMORY:
        yield Finding("shm", WARNING, "little", {"free": machine.shared_memory or 0})
    else:
        yield Finding("shm", FINE, "enough", {"free": machine.shared_memory})
    facts = answer.facts.get("vllm", {})
    share = float(facts.get("memory_share") or MEMORY_SHARE)
    claimed = int(machine.memory_total * share)
    free = min(machine.memory_available, machine.memory_limit or machine.memory_available)
    numbers = {
        "total": machine.memory_total,
        "available": machine.memory_available,
        "limit": machine.memory_limit,
        "share": share,
        "claimed": claimed,
    }
    # a GPU build claims its share of the GPU's memory instead
    claims = facts.get("platform") == "cpu" and not environment.get("VLLM_CPU_KVCACHE_SPACE")
    short = claims and claimed > free
    yield Finding("memory", WARNING if short else FINE, "claimed" if short else "enough", numbers)
