"""`localize init`."""

from __future__ import annotations

from pathlib import Path

import click

from localizer.errors import LocalizerError


@click.command("init")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("localize.toml"))
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
def command(file: Path, force: bool) -> None:
    """Write a commented localize.toml, to be edited and run.

    FILE is localize.toml unless said.
    """
    from localizer.run.config import TEMPLATE

    if file.exists() and not force:
        raise LocalizerError(f"{file} is there already; name another file, or overwrite it with --force.")
    file.write_text(TEMPLATE, encoding="utf-8")
    click.echo(f"{file} is written: edit [workload], [candidate] and [engine], then: localize run {file}")
