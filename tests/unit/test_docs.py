"""What can be typed is in the documentation, and what the documentation shows works."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import pytest
from builders import BFLOAT16, Plan, attention, write

from localizer.cli.main import COMMANDS, localize
from localizer.store.reader import Capture
from localizer.store.schema import DRAFT_PADDING, KINDS, Manifest, Open
from localizer.store.writer import COLUMNS

ROOT = Path(__file__).parents[2]
FILES = [*ROOT.glob("README.md"), *sorted((ROOT / "docs").glob("*.md"))]
DOCS = "\n".join(path.read_text() for path in FILES)
FORMAT = (ROOT / "docs" / "capture-format.md").read_text()


def command(name: str) -> click.Command:
    found = importlib.import_module(f"localizer.cli.{name}").command
    assert isinstance(found, click.Command)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_is_documented(name: str) -> None:
    assert command(name).help
    assert f"localize {name}" in DOCS


@pytest.mark.parametrize("name", [*COMMANDS, ""])
def test_every_option_is_documented(name: str) -> None:
    """Each spelling of each option stands in README.md or docs/*.md as it is typed."""
    parameters = (command(name) if name else localize).params
    options = [parameter for parameter in parameters if isinstance(parameter, click.Option)]
    spellings = {spelling for option in options for spelling in [*option.opts, *option.secondary_opts]}
    missing = {spelling for spelling in spellings if not re.search(rf"{re.escape(spelling)}(?![\w-])", DOCS)}
    assert not missing


def test_links_lead_somewhere() -> None:
    for page in [*FILES, ROOT / "docs" / "examples" / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page} links to {target}"


# -- the capture format -----------------------------------------------------------------------------------


def records(kind: type[msgspec.Struct]) -> set[type[msgspec.Struct]]:
    """A record and all records inside it."""
    found = {kind}
    for field in msgspec.structs.fields(kind):
        for module, name in re.findall(r"(localizer\.store\.\w+)\.(\w+)", str(field.type)):
            inner = getattr(importlib.import_module(module), name)
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                found |= records(inner)
    return found


@pytest.mark.parametrize("kind", [Open, Manifest])
def test_every_field_of_the_documents_is_described(kind: type[msgspec.Struct]) -> None:
    names = {field for record in records(kind) for field in record.__struct_fields__}
    assert not {name for name in names if not re.search(rf"[`.]{name}[`.]", FORMAT)}


def test_every_column_and_kind_is_described() -> None:
    for name, dtype in COLUMNS.items():
        assert f"| `{name}` | {dtype.name} " in FORMAT
    for code, kind in enumerate(KINDS[: DRAFT_PADDING + 1]):
        assert f"| {code} | `{kind}` |" in FORMAT


def test_the_example_reads_a_row(tmp_path: Path) -> None:
    """The program in the format's description needs only numpy, and reads what the library reads."""
    example = re.findall(r"```python\n(.*?)```", FORMAT, re.DOTALL)
    assert len(example) == 1
    (tmp_path / "read_row.py").write_text(example[0])
    capture = Capture(write(tmp_path, Plan()))
    site, row = attention(1, "query"), 4
    done = subprocess.run(
        [sys.executable, "read_row.py", str(capture.folder), site, str(row)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    stored = capture.row_payload(site, row)
    assert stored is not None
    assert stored.dtype == BFLOAT16
    index = [found.name for found in capture.sites].index(site)
    assert done.stdout.split() == [
        capture.requests[capture.table.columns["request"][row]],
        str(capture.table.columns["position"][row]),
        bytes(capture.table.digest[row, index]).hex(),
        stored.tobytes().hex(),
    ]
