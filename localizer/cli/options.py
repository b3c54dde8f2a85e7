"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

captures_root = click.option(
    "--out",
    "root",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("captures"),
    show_default=True,
    help="Folder of the captures.",
)


def _format(*styles: str) -> Callable[[F], F]:
    return click.option(
        "--format",
        "style",
        type=click.Choice(styles),
        default="text",
        show_default=True,
        help="How the result is printed.",
    )


output_format = _format("text", "json")
result_format = _format("text", "json", "markdown")
"""That of a result, for which there are presenters in `localizer.report.formats`."""
