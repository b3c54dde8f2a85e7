"""`localize show`."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec

from localizer.cli.options import captures_root, output_format
from localizer.report.captures import details
from localizer.report.facts import schedule
from localizer.store.names import load


@click.command("show")
@click.argument("capture")
@output_format
@captures_root
def command(capture: str, style: str, root: Path) -> None:
    """Show what a capture holds.

    CAPTURE is NAME (the newest), NAME/NNNN, or a folder.
    """
    taken = load(root, capture)
    if style == "json":
        documents = {
            "open": taken.open,
            "manifest": taken.manifest,
            "complete": taken.complete,
            "schedule": schedule(taken.steps),
        }
        click.echo(
            json.dumps(msgspec.to_builtins(documents), indent=2)
        )  # ASCII: nothing in it can become live
    else:
        click.echo(details(taken))
