"""`localize models`."""

from __future__ import annotations

import click

from localizer.cli.progress import ConsoleProgress
from localizer.report.models import listing
from localizer.workload import models


@click.command("models")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List the models that localizer builds, or build one.

    With NAME: builds that model unless it is built, and prints its folder. --model NAME of capture does so
    too. The models lie in the folder LOCALIZER_CACHE.
    """
    if name is None:
        click.echo(listing(models.BUILT_IN.values()))
    else:
        progress = ConsoleProgress(name)
        try:
            folder = models.built(name, progress.phase)
        finally:
            progress.close()
        click.echo(str(folder))
