"""`localize intervene`: does one change inside a running vLLM make the difference?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from localizer.capture.interventions import intervention
from localizer.cli.capture import command as capture_command
from localizer.cli.capture import requested, taking
from localizer.cli.options import output_format
from localizer.report.captures import made
from localizer.store.names import load
from localizer.wire.phases import ATTENTION_BACKEND, PREFIX_CACHE

OWN = ("name", "model", "taps")
"""Parameters of `localize capture` that are others here, or not there: patches need the worker extension."""

REPORTING = ("of", "style", "root")
"""Parameters that go with `--of`."""


@click.command("intervene", params=[option for option in capture_command.params if option.name not in OWN])
@click.argument("name", required=False)
@click.option("--model", help="Model folder, hub name, or one of `localize models`, e.g. tiny.")
@click.option(
    "--patch",
    "patches",
    multiple=True,
    metavar="TARGET=FILE:NAME",
    help="In phase B, NAME of FILE stands in for TARGET, module:function or module:Class.method. Repeatable.",
)
@click.option(
    "--patch-everywhere", "everywhere", is_flag=True, help="Replace it under every other name it has, too."
)
@click.option(
    "--phase",
    type=click.Choice([PREFIX_CACHE, ATTENTION_BACKEND]),
    help="Instead of a patch: B begins with an empty prefix cache, or with new attention metadata builders.",
)
@click.option("--keep-prefix-cache", is_flag=True, help="Do not empty the prefix cache before each phase.")
@click.option("--of", metavar="CAPTURE", help="Report again from a capture that is there; run nothing.")
@output_format
@click.pass_context
def command(
    context: click.Context,
    name: str | None,
    model: str | None,
    patches: tuple[str, ...],
    everywhere: bool,
    phase: str | None,
    keep_prefix_cache: bool,
    of: str | None,
    style: str,
    root: Path,
    **options: Any,
) -> None:
    """Change one thing in a running vLLM and put it back: what did that change?

    In one process, the workload is done as it is (A1), changed (B) and restored (A2); --repeats are the
    passes of one phase. B is then compared with A1, and A2 is the control. Exit codes: 0 identical,
    1 diverged, 2 failed, 3 inconclusive, 130 stopped by Ctrl-C.
    """
    from localizer.diff.intervention import judge
    from localizer.diff.verdict import EXIT_CODES
    from localizer.report.intervention import render

    if of is not None:
        given = (item for item in context.params if item not in REPORTING)
        sources = {item: context.get_parameter_source(item) for item in given}
        if any(source == ParameterSource.COMMANDLINE for source in sources.values()):
            raise click.UsageError(
                "--of reports a capture as it is; give no other options but --format, --out."
            )
        taken = load(root, of)
    else:
        if name is None or model is None:
            raise click.UsageError("Name the capture and the --model, or a capture that is there with --of.")
        asked = intervention(
            patches, phase, options["repeats"], everywhere=everywhere, keep_prefix_cache=keep_prefix_cache
        )
        taken = taking(requested(name, root, model=model, intervention=asked, **options))
        click.echo(made(taken), err=True)
    answer = judge(taken)
    render(style, answer, sys.stdout)
    context.exit(EXIT_CODES[answer.verdict])
