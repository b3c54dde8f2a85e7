"""`localize attach`."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localizer.cli.options import captures_root

if TYPE_CHECKING:
    from localizer.run.attach import Packed

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


NEWEST = "newest"


@click.command("attach")
@click.argument("candidate", required=False)
@click.argument("parent", required=False)
@click.option(
    "--control",
    "controls",
    multiple=True,
    metavar="CAPTURE",
    help="A further capture of the parent; repeatable.",
)
@click.option(
    "--run",
    "run",
    is_flag=False,
    flag_value=NEWEST,
    metavar="[NUMBER]",
    help="Instead of two captures: those of a run of localize run, the newest unless numbered.",
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
@click.option(
    "--comment",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="The comment; - for standard output.  [default: beside the archive, NAME.md]",
)
@click.option("--attachment-url", default="", metavar="URL", help="Where the archive can be fetched.")
@click.option(
    "--post",
    metavar="OWNER/REPO#N",
    help="Post the comment on that pull request, or edit the one that is there.",
)
@click.option("--dry-run", is_flag=True, help="Print what --post would post, and post nothing.")
@captures_root
def command(
    candidate: str | None,
    parent: str | None,
    controls: tuple[str, ...],
    run: str | None,
    output: Path | None,
    limit: int,
    redact: bool,
    comment: Path | None,
    attachment_url: str,
    post: str | None,
    dry_run: bool,
    root: Path,
) -> None:
    """Pack captures and their diff into an archive for a pull request.

    Writes NAME.zip, and NAME.md: the verdict, its evidence and its limits as a comment. Anyone can check the
    archive with localize verify FILE.zip, and compare again with localize diff FILE.zip:candidate
    FILE.zip:parent. With an archive alone, its comment is made again. Exit codes: 0 done, 2 it is not.
    """
    from localizer.github import sticky
    from localizer.report import archive
    from localizer.report.comment import whole
    from localizer.run import attached

    if dry_run and (post is None or comment is not None):
        raise click.UsageError(
            "--dry-run prints what --post would post; give it with --post, without --comment."
        )
    url = attached.checked_url(attachment_url)
    target = None if post is None else sticky.Target.parse(post)
    github = None if target is None or dry_run else sticky.connect(os.environ)
    to_stdout = dry_run or str(comment) == "-"
    if candidate is not None and parent is None and run is None:
        if controls or output is not None:
            raise click.UsageError(
                "Name the parent's capture as well; an archive alone takes no such options."
            )
        path, changed = Path(candidate), []
    else:
        packed = _pack(candidate, parent, controls, run, output, limit, redact, root)
        path, changed = packed.path, packed.changed
        made = archive.made(packed.path, packed.size, packed.sha256, packed.left_out, packed.changed)
        click.echo(made, err=to_stdout)
    evidence = attached.read(path, changed, url)
    text = whole(evidence)
    if to_stdout:
        click.echo(text, nl=False)
    else:
        written = attached.keep(comment or path.with_suffix(".md"), text)
        click.echo(archive.commented(written, text, path, posting=github is not None))
    if github is not None and target is not None:
        done = sticky.post(github, target, partial(whole, evidence))
        click.echo(archive.posted(done.url, done.edited, bool(url)), err=to_stdout)


def _pack(
    candidate: str | None,
    parent: str | None,
    controls: tuple[str, ...],
    run: str | None,
    output: Path | None,
    limit: int,
    redact: bool,
    root: Path,
) -> Packed:
    """Make the archive of two captures, or of a run."""
    from localizer.run import attached
    from localizer.run.attach import attach
    from localizer.store.names import load
    from localizer.store.output import replaceable, spare

    facts = None
    if run is not None:
        if candidate is not None or controls:
            raise click.UsageError("--run takes the captures of the run; name none beside it.")
        if run != NEWEST and not re.fullmatch(r"\d{1,9}", run, re.ASCII):
            raise click.UsageError(f"--run {run!r} is no number of a run; localize list shows them.")
        of = attached.of_run(root, None if run == NEWEST else int(run))
        both, further, facts = (of.candidate, of.parent), of.controls, of.facts
    elif candidate is None or parent is None:
        raise click.UsageError("Name two captures, or give --run for those of localize run.")
    else:
        both = load(root, candidate), load(root, parent)
        further = [load(root, name) for name in controls]
    path = output or attached.file_name(*both)
    spare(path, root, filter(None, [candidate, parent, *controls]))
    replaceable(path)
    return attach(*both, further, path, limit=limit, redact=redact, run=facts)
