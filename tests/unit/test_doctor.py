"""What doctor finds: interpreters of every kind, machines of every kind, and the words for each.

The interpreters here are shell scripts and the machines are data; tests/integration/test_doctor.py examines
the real vLLM.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localizer.report import doctor as wording
from localizer.sources import doctor
from localizer.sources.doctor import FAILURE, FINE, WARNING, Answer, Finding
from localizer.sources.machine import Machine, look
from localizer.wire.versions import SEEN

GIB = 1 << 30

MACHINE = Machine(
    system="Linux", release="6.1", memory_total=32 * GIB, memory_available=31 * GIB, memory_limit=0,
    memory_file="", shared_memory=GIB,
    disks={"captures": ("captures", 50 * GIB, True), "cache": ("/cache", 50 * GIB, True)},
    compiler="g++", headers_error="", gpu_driver=False,
)  # fmt: skip

VLLM = {
    "version": "0.32.0", "location": "/site/vllm", "platform": "cpu", "triton": False, "memory_share": 0.92,
    "problems": [],
}  # fmt: skip

GOOD: dict[str, dict[str, Any]] = {
    "python": {"version": "3.11.7", "executable": "/bin/python", "include": "/include"},
    "numpy": {"version": "2.3.5"},
    "torch": {"version": "2.13.0+cpu", "cuda": None, "gpus": []},
    "extras": {"errors": {}},
    "transformers": {"version": "5.19.0"},
    "vllm": VLLM,
}


def judged(
    answer: Answer | None = None,
    machine: Machine = MACHINE,
    environment: Mapping[str, str] | None = None,
    **vllm: Any,
) -> list[Finding]:
    """The findings for a good interpreter, with what is said here of its vLLM."""
    answer = answer or Answer("/bin/python", GOOD | {"vllm": VLLM | vllm})
    return list(doctor.judge("python", answer, machine, environment or {}))


def without(*steps: str, **errors: str) -> Answer:
    """A good interpreter in which some steps were not reached and some failed."""
    facts = {name: facts for name, facts in GOOD.items() if name not in steps and name not in errors}
    return Answer("/bin/python", facts, errors)


def bad(findings: list[Finding]) -> dict[str, tuple[str, str]]:
    """Check -> (state, code) of what is not fine."""
    return {finding.check: (finding.state, finding.code) for finding in findings if finding.state != FINE}


# -- judging ----------------------------------------------------------------------------------------------


def test_all_is_well() -> None:
    findings = judged()
    assert bad(findings) == {}
    assert [finding.check for finding in findings] == [
        "system", "python", "torchvision", "numpy", "torch", "transformers", "vllm", "version", "layout",
        "gpu", "triton", "compiler", "captures", "cache", "ring", "shm", "memory",
    ]  # fmt: skip
    assert wording.conclusion(findings) == "Captures work."


@pytest.mark.parametrize("version", SEEN["v1", "cpu"])
def test_seen_versions(version: str) -> None:
    assert bad(judged(version=version)) == {}


MISSING = "ModuleNotFoundError: No module named '{}'"
BROKEN = "RuntimeError: operator torchvision::nms does not exist"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(""), {"python": (FAILURE, "no-interpreter")}),
        (Answer("/bin/true"), {"python": (FAILURE, "unusable")}),
        (Answer("/bin/false", {}, {"start": "exit status 1"}), {"python": (FAILURE, "unusable")}),
        (without("vllm", python="OSError: Function not implemented"), {"python": (FAILURE, "unusable")}),
        (without(vllm=MISSING.format("vllm"), torch=MISSING.format("torch")), {"vllm": (FAILURE, "missing")}),
        (without(torch=MISSING.format("torch"), vllm=MISSING.format("torch")),
         {"torch": (FAILURE, "missing"), "vllm": (FAILURE, "broken")}),
        (without(numpy="ImportError: too new"), {"numpy": (FAILURE, "broken")}),
        (without(vllm="it took longer than 300 seconds"), {"vllm": (FAILURE, "broken")}),
        (without("transformers", "vllm", extras="it was ended by signal 11"),
         {"torchvision": (FAILURE, "crash")}),
    ],
)  # fmt: skip
def test_interpreters(answer: Answer, expected: dict[str, tuple[str, str]]) -> None:
    assert bad(judged(answer)) == expected


def test_an_old_python() -> None:
    answer = Answer("/bin/python", GOOD | {"python": GOOD["python"] | {"version": "3.9.1"}})
    assert bad(judged(answer)) == {"python": (FAILURE, "too-old")}


def test_torchvision() -> None:
    extras = {"extras": {"errors": {"torchvision": BROKEN, "torchaudio": ""}}}
    answer = Answer("/bin/python", GOOD | extras)
    assert bad(judged(answer)) == {"torchvision": (WARNING, "conflict")}
    facts = {name: facts for name, facts in (GOOD | extras).items() if name != "vllm"}
    findings = judged(Answer("/bin/python", facts, {"vllm": BROKEN}))
    assert bad(findings) == {"torchvision": (FAILURE, "conflict"), "vllm": (FAILURE, "entailed")}
    (line,) = [line for line in wording.lines(findings) if "pip uninstall" in line]
    assert line == (
        "FAILS    torchvision  torchvision cannot be imported beside this torch: RuntimeError: operator "
        "torchvision::nms does not exist; /bin/python -m pip uninstall torchvision (text models need none of "
        "them)."
    )


@pytest.mark.parametrize(
    ("vllm", "expected"),
    [
        ({"version": "0.99.0"}, {"version": (WARNING, "untested")}),
        ({"version": "0.32.1.dev5+g123"}, {"version": (WARNING, "untested")}),
        ({"problems": ["LLM has no enqueue"]}, {"layout": (FAILURE, "unknown")}),
        ({"platform": ""}, {"gpu": (FAILURE, "no-device"), "version": (WARNING, "untested"),
                            "triton": (WARNING, "unusable")}),
        ({"platform": "cuda", "triton": True},
         {"gpu": (WARNING, "not-seen"), "version": (WARNING, "untested")}),
    ],
)  # fmt: skip
def test_vllms(vllm: dict[str, Any], expected: dict[str, tuple[str, str]]) -> None:
    assert bad(judged(**vllm)) == expected


def test_gpus_are_named() -> None:
    torch = {"torch": GOOD["torch"] | {"gpus": [{"name": "NVIDIA H200", "memory": 139 * GIB}]}}
    cuda = {"vllm": VLLM | {"platform": "cuda", "triton": True}}
    findings = judged(Answer("/bin/python", GOOD | torch | cuda))
    (gpu,) = [finding for finding in findings if finding.check == "gpu"]
    assert wording.text(gpu) == ("NVIDIA H200 (139.0 GiB)", "")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"system": "Darwin"}, {"system": (FAILURE, "other-system")}),
        ({"compiler": ""}, {"compiler": (WARNING, "missing")}),
        ({"headers_error": "fatal error: Python.h: No such file"}, {"compiler": (WARNING, "no-headers")}),
        ({"headers_error": "cannot execute cc1plus"}, {"compiler": (WARNING, "broken")}),
        ({"memory_file": "Operation not permitted"}, {"ring": (FAILURE, "no-memory-files")}),
        ({"shared_memory": None}, {"shm": (WARNING, "little")}),
        ({"shared_memory": 1 << 20}, {"shm": (WARNING, "little")}),
        ({"memory_available": 20 * GIB}, {"memory": (WARNING, "claimed")}),
        ({"memory_limit": 4 * GIB}, {"memory": (WARNING, "claimed")}),
        ({"memory_limit": 64 * GIB}, {}),
        ({"gpu_driver": True}, {}),
        ({"disks": {"captures": ("c", GIB - 1, True), "cache": ("d", 1, True)}},
         {"captures": (WARNING, "little-space"), "cache": (WARNING, "little-space")}),
        ({"disks": {"captures": ("c", 1, True), "cache": ("d", GIB, False)}},
         {"captures": (FAILURE, "little-space"), "cache": (WARNING, "not-writable")}),
        ({"disks": {"captures": ("c", GIB, False)}}, {"captures": (FAILURE, "not-writable")}),
    ],
)  # fmt: skip
def test_machines(change: dict[str, Any], expected: dict[str, tuple[str, str]]) -> None:
    assert bad(judged(machine=replace(MACHINE, **change))) == expected


def test_memory_is_claimed_by_vllm_on_the_cpu_alone() -> None:
    little = replace(MACHINE, memory_available=GIB)
    assert bad(judged(machine=little, environment={"VLLM_CPU_KVCACHE_SPACE": "1"})) == {}
    assert "memory" not in bad(judged(machine=little, platform="cuda"))
    (finding,) = [finding for finding in judged(machine=little) if finding.check == "memory"]
    assert wording.text(finding) == (
        "1.0 GiB of 32.0 GiB available; vLLM on the CPU claims 29.4 GiB (92%, its gpu_memory_utilization)",
        "--engine kv_cache_memory_bytes=1073741824",
    )


# -- wording ----------------------------------------------------------------------------------------------


def codes() -> set[tuple[str, str]]:
    """All (check, code) that the source of the findings can make."""
    text = Path(doctor.__file__).read_text()
    return {key for key in wording.TEXTS if f'"{key[1]}"' in text}


def test_every_word_is_used_and_bad_news_comes_with_advice() -> None:
    assert codes() == set(wording.TEXTS)
    placeholders = {
        name: ["a", "b"] if name == "packages" else [] if name == "gpus" else 1.0 if name == "share" else 1
        for name in re.findall(r"{(\w+)}", repr(wording.TEXTS) + repr(wording.PACKAGE))
    }
    fine = {"linux", "found", "imported", "absent", "seen", "known", "cpu", "cpu-build", "usable", "unused",
            "works", "space", "memory-files", "enough"}  # fmt: skip
    for (check, code), _ in wording.TEXTS.items():
        said, advice = wording.text(Finding(check, FINE, code, placeholders))
        assert "{" not in said + advice
        assert bool(advice) != (code in fine and (check, code) != ("gpu", "not-seen")), (check, code)


def test_hostile_words_stay_in_line() -> None:
    answer = without(vllm="RuntimeError: \x1b[2J\nall is well")
    assert all(line.isprintable() for line in wording.lines(judged(answer)))


def test_json() -> None:
    tree = json.loads(wording.printed_json(judged(version="0.99.0")))
    assert (tree["schema"], tree["works"]) == (1, True)
    (version,) = [check for check in tree["checks"] if check["check"] == "version"]
    assert (version["state"], version["code"]) == ("warning", "untested")
    assert version["facts"]["version"] == "0.99.0"
    assert version["text"].startswith("untested: vLLM 0.99.0 for the CPU; seen there: 0.27.1, ")
    assert json.loads(wording.printed_json(judged(Answer(""))))["works"] is False


# -- asking -----------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """An interpreter that is a shell script; "$3" is the file for its answers."""

    def write(body: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


def say(*lines: Mapping[str, Any]) -> str:
    return "\n".join(f"echo '{json.dumps(line)}' >> \"$3\"" for line in lines)


def test_answers_are_heard(script: Callable[[str], str]) -> None:
    python = script(
        say({"step": "python"}, {"step": "python", "facts": {"version": "3.11"}}, {"step": "torch"},
            {"step": "torch", "error": "ImportError: no"})
        + '\necho garbage >> "$3"\nexit 0'
    )  # fmt: skip
    assert doctor.ask(python, dict(os.environ)) == Answer(
        python, {"python": {"version": "3.11"}}, {"torch": "ImportError: no"}
    )


@pytest.mark.parametrize(
    ("ending", "step", "error"),
    [
        ("kill -9 $$", "torch", "it was ended by signal 9"),
        ("echo 'no room' >&2; exit 3", "torch", "no room"),
        ("exec sleep 60", "torch", "it took longer than 0.5 seconds"),
    ],
)
def test_how_it_ended_is_told_of_the_step(
    script: Callable[[str], str], ending: str, step: str, error: str
) -> None:
    python = script(say({"step": "torch"}) + f"\n{ending}")
    assert doctor.ask(python, dict(os.environ), seconds=0.5).errors == {step: error}


def test_interpreters_that_are_none(tmp_path: Path, script: Callable[[str], str]) -> None:
    assert doctor.ask(str(tmp_path / "absent"), {}) == Answer("")
    assert doctor.ask(script("exit 7"), {}).errors == {"start": "exit status 7"}
    garbage = tmp_path / "binary"
    garbage.write_bytes(b"\x7fELF nonsense")
    garbage.chmod(0o755)
    assert doctor.ask(str(garbage), {}).errors == {"start": "Exec format error"}


def test_a_bare_python_says_that_vllm_is_missing(tmp_path: Path) -> None:
    """A real interpreter, without the packages of the environment in which the tests run."""
    isolated = tmp_path / "python"
    isolated.write_text(f'#!/bin/sh\nshift\nPYTHONSAFEPATH= exec "{sys.executable}" -S -m "$@"\n')
    isolated.chmod(0o755)
    findings = doctor.examine(str(isolated), tmp_path, tmp_path, os.environ)
    found = bad(findings)
    assert found["vllm"] == (FAILURE, "missing")
    assert not {"python", "torch", "numpy", "torchvision"} & set(found)


# -- looking ----------------------------------------------------------------------------------------------


def test_this_machine(tmp_path: Path) -> None:
    machine = look(tmp_path / "a" / "b", tmp_path, "", dict(os.environ))
    assert machine.system == os.uname().sysname
    assert machine.memory_total >= machine.memory_available > 0
    assert machine.memory_file == ""
    assert machine.disks["captures"][0] == str(tmp_path / "a" / "b")
    assert machine.disks["captures"][1] > 0
    assert machine.disks["captures"][2]


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not look(tmp_path / "file" / "below", tmp_path, "", {}).disks["captures"][2]


def test_compilers(script: Callable[[str], str], tmp_path: Path) -> None:
    for variables, expected in (
        ({"CXX": script("exit 0") + " -O2"}, (script("exit 0"), "")),
        ({"CXX": str(tmp_path / "absent")}, ("", "")),
        ({"PATH": str(tmp_path)}, ("", "")),
    ):
        machine = look(tmp_path, tmp_path, "/include", variables)
        assert (machine.compiler, machine.headers_error) == expected
    broken = script("echo 'fatal: Python.h: No such file' >&2; exit 1")
    assert look(tmp_path, tmp_path, "", {"CXX": broken}).headers_error == "fatal: Python.h: No such file"
