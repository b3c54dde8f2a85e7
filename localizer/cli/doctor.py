"""`localize doctor`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from localizer.cache import cache_folder
from localizer.cli.options import captures_root, output_format
from localizer.cli.progress import ConsoleProgress
from localizer.report.doctor import lines, printed_json
from localizer.sources.doctor import FAILURE, examine


@click.command("doctor")
@click.option(
    "--python", default=sys.executable, help="Interpreter of the source.  [default: localizer's own]"
)
@output_format
@captures_root
def command(python: str, style: str, root: Path) -> int:
    """Say what is installed, what would not work, and what to do about it.

    Imports vLLM in the interpreter of a source, which takes up to half a minute the first time. Exit codes:
    0 captures work, perhaps with warnings, 1 a capture would not work, 2 usage error.
    """
    progress = ConsoleProgress("doctor")
    try:
        progress.phase(f"importing vLLM with {python}")
        findings = examine(python, root, cache_folder(), os.environ)
    finally:
        progress.close()
    click.echo(printed_json(findings) if style == "json" else "\n".join(lines(findings)))
    return 1 if any(finding.state == FAILURE for finding in findings) else 0
