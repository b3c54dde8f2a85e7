"""`localize diff`: where do two captures first differ?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localizer.cli.options import captures_root, output_format
from localizer.errors import LocalizerError

if TYPE_CHECKING:
    from localizer.diff.result import Tolerance


@click.command("diff")
@click.argument("candidate")
@click.argument("parent")
@click.option(
    "--tolerance",
    "tolerances",
    multiple=True,
    metavar="SITE=LIMIT",
    help="Mark differences of up to ulp:N, abs:X or rel:X at sites such as '*/query'; hides none.",
)
@output_format
@captures_root
@click.pass_context
def command(
    context: click.Context, candidate: str, parent: str, tolerances: tuple[str, ...], style: str, root: Path
) -> None:
    """Compare two captures and name the first place that differs.

    CANDIDATE and PARENT are NAME (the newest), NAME/NNNN, or a folder. Exit codes: 0 identical,
    1 diverged, 2 usage error or damaged capture, 3 inconclusive.
    """
    from localizer.diff import diff
    from localizer.diff.verdict import EXIT_CODES
    from localizer.report.formats import render
    from localizer.store.names import load

    given = [_tolerance(text) for text in tolerances]
    result = diff(load(root, candidate), load(root, parent), tolerances=given)
    render(style, result, sys.stdout)
    context.exit(EXIT_CODES[result.verdict])


def _tolerance(text: str) -> Tolerance:
    from localizer.diff.tolerance import parse

    try:
        return parse(text)
    except ValueError as error:
        raise LocalizerError(f"--tolerance {text!r}: {error}.") from None
