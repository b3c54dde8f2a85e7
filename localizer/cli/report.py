"""`localize report`: a comparison to be read, sent on or put into a document."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from localizer.cli.comparison import compare, comparison
from localizer.errors import LocalizerError
from localizer.report.formats import BINARY, SUFFIXES, TEXT, encoded, render
from localizer.store.output import spare, write


@click.command("report")
@comparison
@click.option(
    "--format",
    "style",
    type=click.Choice([*SUFFIXES]),
    help="What is written.  [default: as FILE ends, else text]",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file, which is replaced if it is there.  [default: standard output]",
)
def command(style: str | None, output: Path | None, **what: Any) -> None:
    """Write what two captures say about each other, to be read or sent on.

    CANDIDATE and PARENT are named as for localize diff. html is one page that needs no network; png needs
    the extra localizer[png]. A report is not a check: exit codes are 0 written, 2 an error.
    """
    endings = {ending: form for form, ending in SUFFIXES.items()}
    form = style or (endings.get(output.suffix.lower(), TEXT) if output is not None else TEXT)
    if form in BINARY and output is None:
        raise LocalizerError(f"A report in {form} is no text; name its file with -o FILE.")
    if output is not None:
        spare(output, what["root"], filter(None, [what["candidate"], what["parent"], *what["controls"]]))
    result = compare(cells=form != TEXT, **what)
    if output is not None:
        write(output, encoded(form, result))
    elif form == TEXT:  # a terminal has colours
        render(form, result, sys.stdout)
    else:
        sys.stdout.buffer.write(encoded(form, result))
