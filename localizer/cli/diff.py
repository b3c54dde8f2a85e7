"""`localize diff`: where do two captures first differ?"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from localizer.cli.options import captures_root, output_format


@click.command("diff")
@click.argument("candidate")
@click.argument("parent")
@output_format
@captures_root
@click.pass_context
def command(context: click.Context, candidate: str, parent: str, style: str, root: Path) -> None:
    """Compare two captures and name the first place that differs.

    CANDIDATE and PARENT are NAME (the newest), NAME/NNNN, or a folder. Exit codes: 0 identical,
    1 diverged, 2 usage error or damaged capture, 3 inconclusive.
    """
    from localizer.diff import diff
    from localizer.diff.verdict import EXIT_CODES
    from localizer.report.formats import render
    from localizer.store.names import load

    result = diff(load(root, candidate), load(root, parent))
    render(style, result, sys.stdout)
    context.exit(EXIT_CODES[result.verdict])
