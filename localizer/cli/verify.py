"""`localize verify`."""

from __future__ import annotations

from pathlib import Path

import click

from localizer.cli.options import captures_root
from localizer.errors import DamagedCapture
from localizer.report.captures import archive_verification, verification
from localizer.store import archive
from localizer.store.names import find
from localizer.store.verify import DAMAGED, EXIT_CODES, Verification, verify, verify_archive


@click.command("verify")
@click.argument("capture")
@captures_root
def command(capture: str, root: Path) -> int:
    """Check that a capture, or an archive of captures, is what its records say.

    CAPTURE is NAME, NAME/NNNN, a folder, FILE.zip or FILE.zip:CAPTURE. Exit codes: 0 sound and complete,
    3 sound but incomplete, 1 damaged, 2 not a capture.
    """
    inside = archive.find(root, capture)
    if inside is None:
        folder = find(root, capture)
        result = verify(folder)
        click.echo(verification(folder, result))
        return EXIT_CODES[result.state]
    path, name = inside
    if name is None:
        found = verify_archive(path)
        click.echo(archive_verification(path, found))
        return EXIT_CODES[found.state]
    try:
        one = archive.Archive(path).load(name)
        result = verify(one.folder)
        shown = one.shown
    except DamagedCapture as error:
        result, shown = Verification(DAMAGED, [archive.named(str(error))], 0, 0, 0), capture
    click.echo(verification(shown, result))
    return EXIT_CODES[result.state]
