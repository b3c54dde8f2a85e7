"""`localize attach`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from localizer.cli.options import captures_root

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
LEAST, MOST = 10**5, 1 << 31


class Size(click.ParamType):
    """A number of bytes, such as 25MB."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes that a text says."""
        match = re.fullmatch(r"(\d{1,12})\s*([KMG]I?B)?", str(value).upper(), re.ASCII)
        size = int(match[1]) * UNITS[match[2] or ""] if match else 0
        if not LEAST <= size < MOST:
            self.fail(f"{value!r} is no size from 100KB to 2GiB, such as 25MB.", param, ctx)
        return size


@click.command("attach")
@click.argument("candidate")
@click.argument("parent")
@click.option(
    "--control",
    "controls",
    multiple=True,
    metavar="CAPTURE",
    help="A further capture of the parent; repeatable.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The archive.  [default: CANDIDATE-PARENT.zip]",
)
@click.option("--limit", default="25MB", show_default=True, type=Size(), help="Most bytes of the archive.")
@click.option(
    "--redact/--no-redact",
    default=True,
    show_default=True,
    help="Leave out prompts, tokens outside the witness, names, paths, other environment, the log.",
)
@captures_root
def command(
    candidate: str,
    parent: str,
    controls: tuple[str, ...],
    output: Path | None,
    limit: int,
    redact: bool,
    root: Path,
) -> None:
    """Pack captures and their diff into an archive for a pull request.

    Anyone can check it with localize verify FILE.zip, and compare again with
    localize diff FILE.zip:candidate FILE.zip:parent. Exit codes: 0 the archive is made, 2 it is not.
    """
    from localizer.report.archive import made
    from localizer.run.attach import attach
    from localizer.store.names import load

    both = load(root, candidate), load(root, parent)
    further = [load(root, name) for name in controls]
    path = output or Path(f"{both[0].open.name}-{both[1].open.name}.zip")
    packed = attach(*both, further, path, limit=limit, redact=redact)
    click.echo(made(packed.path, packed.size, packed.sha256, packed.left_out, packed.changed))
