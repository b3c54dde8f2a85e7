"""Imports run one way, and a laptop without torch and vLLM can read and compare captures."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from builders import Plan, pair

import localizer

PACKAGE = Path(localizer.__file__).parent

LEVELS = {
    "cli": 5,
    "run": 4,
    "github": 4,
    "capture": 3,
    "report": 3,
    "diff": 2,
    "sources": 1,
    "workload": 1,
    "store": 1,
    "wire": 0,
}
"""A package imports those of its own level and below; hooks stand apart."""

LEAVES = {"errors", "cache", "__init__"}
"""Modules that anyone may import and that import nothing of localizer but each other."""

LAZY = {"cli/demo.py"}
"""Modules that may import anything, but nothing heavy at their top."""


def modules(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (PACKAGE / package).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Full names of all modules that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            module = node.module or ""
            yield from (
                (f"{module}.{alias.name}" for alias in node.names) if module == "localizer" else (module,)
            )


def ours(path: Path) -> set[str]:
    """The parts of localizer (packages, or modules at its top) that a module imports."""
    names = (name.split(".") for name in imported(path))
    found = {parts[1] for parts in names if parts[0] == "localizer" and len(parts) > 1}
    return {name for name in found if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()}


def foreign(path: Path) -> set[str]:
    """Top-level packages that a module imports, but for localizer and the standard library."""
    tops = {name.partition(".")[0] for name in imported(path)}
    return tops - {"localizer", "__future__"} - set(sys.stdlib_module_names)


def test_every_package_is_known() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages - {"hooks"} <= set(LEVELS)
    assert "hooks" in packages


@pytest.mark.parametrize("package", LEVELS)
def test_imports_run_one_way(package: str) -> None:
    for path in modules(package):
        if str(path.relative_to(PACKAGE)) in LAZY:
            continue
        above = {name for name in ours(path) - LEAVES if LEVELS.get(name, 99) > LEVELS[package]}
        assert not above, f"{path} imports {sorted(above)}"


def test_no_two_packages_import_each_other() -> None:
    graph = {package: set[str]() for package in LEVELS}
    for package in LEVELS:
        for path in modules(package):
            if str(path.relative_to(PACKAGE)) not in LAZY:
                graph[package] |= ours(path) - LEAVES - {package}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_leaves_import_nothing(leaf: str) -> None:
    assert ours(PACKAGE / f"{leaf}.py") <= LEAVES
    assert foreign(PACKAGE / f"{leaf}.py") == set()


def test_hooks_import_only_wire_torch_numpy_and_vllm() -> None:
    for path in modules("hooks"):
        assert ours(path) <= {"hooks", "wire"}, path
        kernels = {"triton"} if path.name == "rowdigest_kernel.py" else set()
        assert foreign(path) <= {"torch", "numpy", "vllm"} | kernels, path
    for path in modules("wire"):
        assert ours(path) <= {"wire"}, path
        assert foreign(path) <= {"numpy"}, path


def test_nothing_imports_hooks() -> None:
    """Whoever starts them names them as a string."""
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "hooks":
            assert "hooks" not in ours(path), path


@pytest.mark.parametrize("package", [*LEVELS, "."])
def test_only_hooks_import_torch_and_vllm(package: str) -> None:
    for path in modules(package) if package != "." else sorted(PACKAGE.glob("*.py")):
        assert not foreign(path) & {"torch", "vllm", "transformers"}, path


# -- in fresh processes -----------------------------------------------------------------------------------

HEAVY = ("torch", "vllm", "transformers")


def loaded(code: str, folder: Path) -> set[str]:
    """The heavy modules that are loaded after some code."""
    tail = f"\nimport sys; print(chr(10), *(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code + tail], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def calling(*arguments: str) -> str:
    """Code that calls localize as the console script does."""
    return (
        f"import sys; sys.argv = ['localize', *{arguments!r}]\n"
        "from localizer.cli.main import main\n"
        "try: main()\nexcept SystemExit as ended: assert ended.code in (0, None), ended.code"
    )


@pytest.mark.parametrize(
    "module", ["localizer.diff.pipeline", "localizer.report.formats", "localizer.capture.session"]
)
def test_importing_loads_nothing_heavy(tmp_path: Path, module: str) -> None:
    assert loaded(f"import {module}", tmp_path) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("capture", "--help"),
        ("intervene", "--help"),
        ("demo", "--help"),
        ("doctor", "--help"),
        ("models",),
        ("list",),
        ("verify", "candidate"),
        ("show", "candidate"),
        ("diff", "candidate", "parent"),
        ("diff", "candidate", "parent", "--format", "json"),
        ("report", "candidate", "parent", "-o", "x.html"),
        ("attach", "candidate", "parent", "-o", "x.zip"),
    ],
    ids=" ".join,
)
def test_commands_load_nothing_heavy(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    pair(tmp_path / "captures", Plan())
    assert loaded(calling(*arguments), tmp_path) == set()


def test_this_test_would_see_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert loaded("import torch", tmp_path) == {"torch"}


def test_help_does_not_import_the_commands(tmp_path: Path) -> None:
    code = calling("--help") + "\nassert not [m for m in sys.modules if m in ('numpy', 'localizer.cli.diff')]"
    loaded(code, tmp_path)
