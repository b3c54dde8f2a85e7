"""`localize list`."""

from __future__ import annotations

from pathlib import Path

import click

from localizer.cli.options import captures_root
from localizer.report.captures import history


@click.command("list")
@captures_root
def command(root: Path) -> None:
    """List the captures.

    One line a capture, oldest first: name, when, source, workload, state; then one line a run of localize
    run: when, its finished captures, its verdict.
    """
    click.echo(history(root))
