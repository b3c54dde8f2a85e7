"""`localize diff`: where do two captures first differ?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localizer.cli.options import captures_root, result_format
from localizer.errors import LocalizerError

if TYPE_CHECKING:
    from localizer.diff.result import Tolerance


@click.command("diff")
@click.argument("candidate")
@click.argument("parent", required=False)
@click.option(
    "--control",
    "controls",
    multiple=True,
    metavar="CAPTURE",
    help="A further capture of the parent: does the parent differ from itself there? Repeatable.",
)
@click.option(
    "--within", is_flag=True, help="Compare equal prefixes inside one capture; PARENT is then left out."
)
@click.option("--explain", is_flag=True, help="Say how rows were paired, and why others were not.")
@click.option(
    "--tolerance",
    "tolerances",
    multiple=True,
    metavar="SITE=LIMIT",
    help="Mark differences of up to ulp:N, abs:X or rel:X at sites such as '*/query'; hides none.",
)
@click.option(
    "--payload", is_flag=True, help="Compare the stored rows byte for byte too, instead of trusting digests."
)
@result_format
@captures_root
@click.pass_context
def command(
    context: click.Context,
    candidate: str,
    parent: str | None,
    controls: tuple[str, ...],
    within: bool,
    explain: bool,
    tolerances: tuple[str, ...],
    payload: bool,
    style: str,
    root: Path,
) -> None:
    """Compare two captures and name the first place that differs.

    CANDIDATE and PARENT are NAME (the newest), NAME/NNNN, or a folder. With --within CAPTURE one
    capture is compared with itself. Exit codes: 0 identical, 1 diverged, 2 usage error or damaged
    capture, 3 inconclusive.
    """
    from localizer.diff import diff, diff_within
    from localizer.diff.verdict import EXIT_CODES
    from localizer.report.formats import render
    from localizer.store.names import load

    if within and (parent is not None or controls):
        raise click.UsageError("--within compares one capture with itself; name one, without --control.")
    if not within and parent is None:
        raise click.UsageError("Name the parent's capture as well; --within compares one with itself.")
    given = [_tolerance(text) for text in tolerances]
    if parent is None:
        result = diff_within(load(root, candidate), tolerances=given, explain=explain, payload=payload)
    else:
        both = load(root, candidate), load(root, parent)
        further = [load(root, name) for name in controls]
        result = diff(*both, further, tolerances=given, explain=explain, payload=payload)
    render(style, result, sys.stdout)
    context.exit(EXIT_CODES[result.verdict])


def _tolerance(text: str) -> Tolerance:
    from localizer.diff.tolerance import parse

    try:
        return parse(text)
    except ValueError as error:
        raise LocalizerError(f"--tolerance {text!r}: {error}.") from None
