"""What `localize diff` and `localize report` compare: their arguments and options, and the comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localizer.cli.options import captures_root
from localizer.errors import LocalizerError

if TYPE_CHECKING:
    from localizer.diff.result import Result, Tolerance

_PARAMETERS = (
    click.argument("candidate"),
    click.argument("parent", required=False),
    click.option(
        "--control",
        "controls",
        multiple=True,
        metavar="CAPTURE",
        help="A further capture of the parent: does the parent differ from itself there? Repeatable.",
    ),
    click.option(
        "--within", is_flag=True, help="Compare equal prefixes inside one capture; PARENT is then left out."
    ),
    click.option(
        "--tolerance",
        "tolerances",
        multiple=True,
        metavar="SITE=LIMIT",
        help="Mark differences of up to ulp:N, abs:X or rel:X at sites such as '*/query'; hides none.",
    ),
    captures_root,
)


def comparison(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the arguments that `compare` takes."""
    for parameter in reversed(_PARAMETERS):
        command = parameter(command)
    return command


def compare(
    candidate: str,
    parent: str | None,
    controls: Sequence[str],
    within: bool,
    tolerances: Sequence[str],
    root: Path,
    **more: Any,
) -> Result:
    """The result of a diff; `more` are keywords of `localizer.diff.diff`.

    Raises:
        click.UsageError: what was named does not go together.
        LocalizerError: a capture cannot be used.
    """
    from localizer.diff import diff, diff_within
    from localizer.store.names import load

    if within and (parent is not None or controls):
        raise click.UsageError("--within compares one capture with itself; name one, without --control.")
    if not within and parent is None:
        raise click.UsageError("Name the parent's capture as well; --within compares one with itself.")
    given = [_tolerance(text) for text in tolerances]
    if parent is None:
        return diff_within(load(root, candidate), tolerances=given, **more)
    both = load(root, candidate), load(root, parent)
    return diff(*both, [load(root, name) for name in controls], tolerances=given, **more)


def _tolerance(text: str) -> Tolerance:
    from localizer.diff.tolerance import parse

    try:
        return parse(text)
    except ValueError as error:
        raise LocalizerError(f"--tolerance {text!r}: {error}.") from None
