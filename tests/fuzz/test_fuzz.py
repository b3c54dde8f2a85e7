"""A bounded run of every fuzz target: the committed corpus, and mutations of it (docs/fuzzing.md)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fuzz import targets

HERE = Path(__file__).parent
RUNS = {"tensors": 8000, "documents": 4000, "captures": 500}

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed; it has wheels for Linux on x86-64 only",
)


@needs_atheris
@pytest.mark.parametrize("target", RUNS)
def test_no_input_does_harm(target: str) -> None:
    command = [sys.executable, str(HERE / "run.py"), "--target", target, "--runs", str(RUNS[target])]
    limits = ["--seconds", "60", "--timeout", "60", "--seed", "1"]
    done = subprocess.run([*command, *limits], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Done " in done.stderr


@pytest.mark.parametrize("target", RUNS)
def test_the_corpus_does_no_harm_without_atheris(target: str, tmp_path: Path) -> None:
    for path in sorted((HERE / "corpus" / target).iterdir()):
        with tempfile.TemporaryDirectory(dir=tmp_path) as scratch:
            targets.TARGETS[target].use(path.read_bytes(), Path(scratch))


@needs_atheris
def test_harm_is_found(tmp_path: Path) -> None:
    """The run fails where an input does more than be read or be refused."""
    code = (
        "import sys; from pathlib import Path; import runpy\n"
        f"sys.path.insert(0, {str(HERE.parent)!r})\n"
        "from localizer.store import strict\n"
        "strict.loads = lambda blob: 1 / 0\n"
        f"sys.argv = ['run.py', '--target', 'tensors', '--runs', '50', '--found', {str(tmp_path)!r}]\n"
        f"runpy.run_path({str(HERE / 'run.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stdout + done.stderr
    assert [path.name.split("-")[:2] for path in tmp_path.iterdir()] == [["tensors", "crash"]]


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in (HERE / "corpus").rglob("*") if path.is_file()) < 200_000
