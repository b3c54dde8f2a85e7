"""`localize diff`: where do two captures first differ?"""

from __future__ import annotations

import sys
from typing import Any

import click

from localizer.cli.comparison import compare, comparison
from localizer.cli.options import result_format


@click.command("diff")
@comparison
@click.option("--explain", is_flag=True, help="Say how rows were paired, and why others were not.")
@click.option(
    "--payload", is_flag=True, help="Compare the stored rows byte for byte too, instead of trusting digests."
)
@result_format
@click.pass_context
def command(context: click.Context, style: str, **what: Any) -> None:
    """Compare two captures and name the first place that differs.

    CANDIDATE and PARENT are NAME (the newest), NAME/NNNN, or a folder. With --within CAPTURE one
    capture is compared with itself. Exit codes: 0 identical, 1 diverged, 2 usage error or damaged
    capture, 3 inconclusive.
    """
    from localizer.diff.verdict import EXIT_CODES
    from localizer.report.formats import render

    result = compare(**what)
    render(style, result, sys.stdout)
    context.exit(EXIT_CODES[result.verdict])
