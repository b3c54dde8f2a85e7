"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

captures_root = click.option(
    "--out",
    "root",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("captures"),
    show_default=True,
    help="Folder of the captures.",
)

output_format = click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How the result is printed.",
)
