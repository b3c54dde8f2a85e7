"""`localize verify`."""

from __future__ import annotations

from pathlib import Path

import click

from localizer.cli.options import captures_root
from localizer.report.captures import verification
from localizer.store.names import find
from localizer.store.verify import EXIT_CODES, verify


@click.command("verify")
@click.argument("capture")
@captures_root
def command(capture: str, root: Path) -> int:
    """Check that a capture is what its records say.

    Exit codes: 0 sound and complete, 3 sound but incomplete, 1 damaged, 2 not a capture.
    """
    folder = find(root, capture)
    result = verify(folder)
    click.echo(verification(folder, result))
    return EXIT_CODES[result.state]
