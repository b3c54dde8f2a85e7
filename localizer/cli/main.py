"""The command line: commands are imported when called, errors become one sentence and an exit code."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback

import click

from localizer import __version__
from localizer.errors import CaptureFailed, LocalizerError

COMMANDS = {
    "capture": "Run a workload on a vLLM and record what it computes.",
    "diff": "Compare two captures and name the first place that differs.",
    "report": "Write what two captures say about each other, to be read or sent on.",
    "init": "Write a commented localize.toml, to be edited and run.",
    "run": "Run candidate and parent, with controls and a witness pass, and name the first difference.",
    "intervene": "Change one thing in a running vLLM and put it back: what did that change?",
    "show": "Show what a capture holds.",
    "list": "List the captures.",
    "verify": "Check that a capture, or an archive of captures, is what its records say.",
    "attach": "Pack captures and their diff into an archive for a pull request.",
    "models": "List the models that localizer builds, or build one.",
    "doctor": "Say what is installed, what would not work, and what to do about it.",
    "demo": "Plant a fault in a real vLLM and find it: a tour.",
}
"""Commands in the order of `--help`, each with the first line of its own help."""


class Commands(click.Group):
    """A group that imports a command's module, `localizer.cli.NAME`, only when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"localizer.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="localize")
def localize() -> None:
    """Name the first layer at which two vLLM sources diverge.

    Capture a candidate and its parent, then diff the captures. Exit codes: 0 identical (or done),
    1 diverged (or damaged), 2 usage or tool error, 3 inconclusive (or incomplete).
    """


def main() -> None:
    """The console script `localize`."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = localize.main(prog_name="localize", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort:
        status = _complain("Stopped.", 130)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except LocalizerError as error:
        status = _complain(str(error), error.exit_code, lines=isinstance(error, CaptureFailed))
    except KeyboardInterrupt:
        status = _complain("Stopped.", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except OSError as error:
        status = _complain(f"{error.filename or 'A file'} cannot be used ({error.strerror or error}).", 2)
    except Exception as error:
        if os.environ.get("LOCALIZER_DEBUG"):
            traceback.print_exc()
        status = _complain(
            f"localizer itself failed ({type(error).__name__}: {error}); please report it, "
            "with the output of the same command under LOCALIZER_DEBUG=1.",
            2,
        )
    sys.exit(status)


def _complain(sentence: str, status: int, *, lines: bool = False) -> int:
    """Say what went wrong, in one line unless `lines`; names and texts in it may be a stranger's."""
    from localizer.report.safe import clean

    archive = sys.modules.get("localizer.store.archive")  # where a capture lies that it unpacked
    sentence = archive.named(sentence) if archive is not None else sentence
    shown = [clean(line, 4000) for line in (sentence.split("\n") if lines else [sentence])]
    click.echo(f"localize: {shown[0]}" if len(shown) == 1 else "\n".join(shown), err=True)
    return status


if __name__ == "__main__":
    main()
