"""`localize capture`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from localizer.capture.request import BUFFER_MIB, CaptureRequest
from localizer.capture.session import capture
from localizer.cli.options import captures_root
from localizer.cli.progress import ConsoleProgress
from localizer.report.captures import made
from localizer.store.reader import Capture
from localizer.wire.ranks import MOST_RANKS
from localizer.wire.spec import BOUNDARY, HOST, LEVELS, ROW_DIGESTS
from localizer.workload.plan import MATRIX, parse_pairs


class Count(click.IntRange):
    """A whole number that fits every use."""

    def __init__(self, least: int = 1) -> None:
        super().__init__(least, 2**31 - 1)


@click.command("capture")
@click.argument("name")
@click.option(
    "--model", required=True, help="Model folder, hub name, or one of `localize models`, e.g. tiny."
)
@click.option(
    "--python", default=sys.executable, help="Interpreter of the source.  [default: localizer's own]"
)
@click.option(
    "--overlay",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with a vllm/ tree whose files stand in for those of the installed vLLM.",
)
@click.option(
    "--git",
    default="",
    metavar="REPO@REV",
    help="Git revision whose vllm/ tree stands in likewise; nothing is written into the repository.",
)
@click.option("--matrix", default=MATRIX, show_default=True, help="Batch sizes of the rounds of one pass.")
@click.option("--repeats", default=2, show_default=True, type=Count(), help="Passes over the matrix.")
@click.option("--prompt-tokens", default=16, show_default=True, type=Count(), help="Length of each prompt.")
@click.option("--max-tokens", default=64, show_default=True, type=Count(), help="New tokens a request.")
@click.option(
    "--logprobs",
    type=Count(-1),
    help="Keep the logprobs that vLLM returns of so many tokens beside each; 0 the selected one's, -1 all.",
)
@click.option("--seed", default=0, show_default=True, type=Count(0), help="Seed of the prompts.")
@click.option(
    "--layers", default="all", show_default=True, help="Attention layers to tap: first, all, or 0,5-9."
)
@click.option(
    "--level",
    default=BOUNDARY,
    show_default=True,
    type=click.Choice(LEVELS),
    help="What is tapped: ops at the host boundary, or in eager mode every module as well.",
)
@click.option(
    "--payload",
    default="first",
    show_default=True,
    type=click.Choice(["none", "first", "all"]),
    help="Whose rows are kept beside their digests: no site's, the first tapped layer's, or every site's.",
)
@click.option(
    "--sites", multiple=True, metavar="PATTERN", help="Record only sites such as '*/query'.  [default: *]"
)
@click.option(
    "--rows",
    multiple=True,
    metavar="ROWS",
    help="Rows that keep their payload: all, last, r03.05, r03.05:40-48 or r03.05:last.  [default: all]",
)
@click.option(
    "--transactions",
    default="all",
    show_default=True,
    help="Forwards in which rows keep their payload: all, first:2, or around:r03.05@41.",
)
@click.option(
    "--engine", multiple=True, metavar="KEY=VALUE", help="vLLM engine argument; JSON values are accepted."
)
@click.option(
    "--speculative-model", default="", help="Model that proposes tokens, or the built-in 'tiny-eagle3'."
)
@click.option(
    "--speculative",
    multiple=True,
    metavar="KEY=VALUE",
    help="Key of vLLM's speculative_config, e.g. method=ngram; JSON values are accepted.",
)
@click.option(
    "--env",
    "environment",
    multiple=True,
    metavar="KEY=VALUE",
    help="Environment variable of the source.",
)
@click.option(
    "--weight-digests/--no-weight-digests",
    "weights",
    default=True,
    help="Hash the loaded weights when the run is over.",
)
@click.option(
    "--kv-contents", is_flag=True, help="Hash the keys and values of each step's requests after the step."
)
@click.option(
    "--row-digest",
    default=HOST,
    show_default=True,
    type=click.Choice(ROW_DIGESTS),
    help="Where rows are hashed: on the host, or those without payload on the GPU.",
)
@click.option(
    "--digest-split",
    default=1,
    show_default=True,
    type=click.IntRange(1, MOST_RANKS),
    metavar="N",
    help="Record attention heads in the ranges that N workers of tensor parallelism would hold.",
)
@click.option(
    "--graph-rows",
    type=Count(),
    help="Tap full CUDA graphs of up to so many rows; rows of larger ones are missing.  [default: all]",
)
@click.option(
    "--graph-memory",
    type=Count(),
    metavar="MIB",
    help="MiB that taps inside full CUDA graphs may take; more is refused.  [default: what is free]",
)
@click.option(
    "--probe",
    "probes",
    multiple=True,
    metavar="TARGET",
    help="Count calls of module:Class.method or module:function; ,cache=ATTR counts hits of a cache too.",
)
@click.option("--taps/--no-taps", default=True, help="Without taps only the returned tokens are kept.")
@click.option(
    "--buffer",
    default=BUFFER_MIB,
    show_default=True,
    type=click.IntRange(1, 1 << 16),
    help="MiB of shared memory between a worker and its writer; where it is full, vLLM waits.",
)
@captures_root
def command(name: str, root: Path, **options: Any) -> int:
    """Run a workload on a vLLM and record what it computes.

    The capture goes under the next number of NAME: captures/NAME/0001, 0002, ... Nothing is overwritten.
    Exit codes: 0 complete, 2 failed, 3 incomplete, 130 stopped by Ctrl-C.
    """
    taken = taking(requested(name, root, **options))
    click.echo(made(taken))
    return 0 if taken.complete else 3


def requested(name: str, root: Path, **options: Any) -> CaptureRequest:
    """The request that options describe, named as the fields of `CaptureRequest`.

    Raises:
        LocalizerError: a pair is no KEY=VALUE.
    """
    pairs = {"engine": "--engine", "speculative": "--speculative", "environment": "--env"}
    for field, option in pairs.items():
        options[field] = parse_pairs(options[field], option, values=field != "environment")
    return CaptureRequest(name=name, root=root, **options)


def taking(request: CaptureRequest) -> Capture:
    """Make a capture while its progress is shown."""
    progress = ConsoleProgress(request.name)
    try:
        return Capture(capture(request, progress))
    finally:
        progress.close()
