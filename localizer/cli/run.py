"""`localize run`: both sources, controls, witness pass, diff and report in one command."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localizer.cli.options import captures_root, result_format
from localizer.workload.plan import parse_pairs

if TYPE_CHECKING:
    from localizer.cli.progress import ConsoleProgress
    from localizer.diff.result import Difference
    from localizer.diff.runs import RunResult
    from localizer.store.reader import Capture


@click.command("run")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("localize.toml"))
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Stand in for a key of the file, e.g. workload.max_tokens=16; JSON values are accepted.",
)
@click.option("--model", help="As workload.model.")
@click.option("--overlay", help="As candidate.overlay.")
@click.option("--layers", help="As selection.layers.")
@click.option("--witness-tries", type=int, help="As run.witness_tries.")
@click.option("--compile-cache", type=click.Choice(["own", "shared"]), help="As run.compile_cache.")
@click.option("--fresh", is_flag=True, help="Begin anew where an interrupted run could be resumed.")
@click.option(
    "--bisect",
    is_flag=True,
    help="End with 1 only where the difference is shown to be the candidate's, with 0 only where nothing "
    "differs and both sources repeat themselves, else with 125.",
)
@result_format
@captures_root
@click.pass_context
def command(
    context: click.Context,
    file: Path,
    overrides: tuple[str, ...],
    model: str | None,
    overlay: str | None,
    layers: str | None,
    witness_tries: int | None,
    compile_cache: str | None,
    fresh: bool,
    bisect: bool,
    style: str,
    root: Path,
) -> None:
    """Run candidate and parent, with controls and a witness pass, and name the first difference.

    FILE is localize.toml unless said; localize init writes one. Every capture is a process of its own and
    is kept; an interrupted run resumes when the same command is given again, a finished one begins anew.
    Exit codes: 0 identical, 1 diverged, 2 an error, 3 inconclusive.

    With --bisect, for git bisect run: 1 where the difference is attributed to the candidate alone (or no
    controls were asked for, with controls = 0), 0 where nothing differs and neither source was seen to
    differ from itself, 125 for anything else, an error included.
    """
    from localizer.diff.bisect import SKIP, judge
    from localizer.diff.verdict import EXIT_CODES
    from localizer.errors import Interrupted, LocalizerError
    from localizer.report.run import skipped

    options = (
        ("workload.model", model),
        ("candidate.overlay", overlay and os.path.abspath(overlay)),
        ("selection.layers", layers),
        ("run.witness_tries", witness_tries),
        ("run.compile_cache", compile_cache),
    )
    try:
        given = list(parse_pairs(overrides, "--set", values=True).items())
        given += [(key, value) for key, value in options if value is not None]
        result = carry_out(file, given, root, style, fresh)
        status = judge(result) if bisect else EXIT_CODES[result.verdict]
        if status == SKIP:
            click.echo(f"localize: {skipped(result)}", err=True)
    except Interrupted as error:
        raise Interrupted(f"{error} The same command resumes the run.") from None
    except Exception as error:
        if not bisect:
            raise
        from localizer.report.safe import clean

        what = str(error) if isinstance(error, LocalizerError) else f"{type(error).__name__}: {error}"
        for line in what.split("\n"):
            click.echo(f"localize: {clean(line, 4000)}", err=True)
        status = SKIP
    context.exit(status)


def carry_out(
    file: Path, overrides: Sequence[tuple[str, Any]], root: Path, style: str, fresh: bool
) -> RunResult:
    """Do the run, print and keep its report."""
    from localizer.capture.session import capture
    from localizer.errors import CaptureFailed
    from localizer.report import run as report
    from localizer.run.config import load
    from localizer.run.pipeline import Pipeline

    config = load(file, overrides)
    watcher = Console()
    with contextlib.ExitStack() as stack:
        stack.callback(watcher.close)
        pipeline = Pipeline(config, root, file.absolute().parent, watcher, capture, fresh)
        record = stack.enter_context(pipeline.record)
        try:
            result = pipeline.run()
        except CaptureFailed as error:
            raise CaptureFailed(
                f"{error}\nWhat was captured before is kept: the same command resumes."
            ) from None
        watcher.close()
        kept = {form: io.StringIO() for form in ("text", "json")}
        for form, stream in kept.items():
            report.render(form, result, stream)
        record.finish(kept["json"].getvalue(), kept["text"].getvalue())
    watcher.tell(f"The report is kept in {record.folder}.")
    if style == "json":
        sys.stdout.write(kept["json"].getvalue())
    else:  # once more: a terminal has colours
        report.render(style, result, sys.stdout)
    return result


class Console:
    """Tells on standard error how a run goes on."""

    def __init__(self) -> None:
        self._progress: ConsoleProgress | None = None

    def tell(self, text: str) -> None:
        """One line about the run."""
        from localizer.report.safe import clean

        click.echo(clean(text, 4000), err=True)

    def differences(self, found: Sequence[Difference]) -> None:
        """What differs between the two sources, before anything runs."""
        from localizer.report import text

        text.write(text.differing(list(found)), sys.stderr)

    def capture(self, name: str) -> ConsoleProgress:
        """The progress of one capture."""
        from localizer.cli.progress import ConsoleProgress

        self.close()
        self._progress = ConsoleProgress(name)
        return self._progress

    def captured(self, capture: Capture) -> None:
        """That capture has ended."""
        from localizer.report.captures import made

        self.close()
        click.echo(made(capture), err=True)

    def close(self) -> None:
        """Take the live line away."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None
