"""What is laid over the installed vLLM: an overlay or a git revision, with its description for open.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from localizer.errors import LocalizerError
from localizer.sources import native, overlay, revision
from localizer.sources.interpreter import Interpreter
from localizer.store import schema


def lay_over(
    folder: Path | None, git: str, python: Interpreter, *, unchanged: bool, say: Callable[[str], None]
) -> tuple[overlay.Laid | None, schema.Overlay | None]:
    """Lay an overlay or a git revision over the installed vLLM, if one is asked for; describe it.

    Args:
        folder: the overlay, or None.
        git: `REPO@REV`, or empty.
        python: the interpreter, whose vLLM it is laid over.
        unchanged: whether it may differ nowhere from that.
        say: hears what takes long.

    Raises:
        LocalizerError: both are asked for, or it cannot be laid over.
    """
    installed = python.vllm_location
    if folder is not None and git:
        raise LocalizerError("A source has one tree of changes; use --overlay or --git, not both.")
    if git:
        found = revision.find(git)
        say(f"reading vllm/ of {found}")
        tree = revision.lay(found, installed, unchanged=unchanged)
        return tree.overlay, schema.Overlay(
            path=str(tree.folder),
            files=tree.overlay.files,
            git=schema.Revision(repository=str(found.repository), revision=found.text, commit=found.commit),
            native=native.of_revision(found.repository, found.commit, installed, python.vllm),
        )
    if folder is None:
        return None, None
    laid = overlay.lay(folder, installed, unchanged=unchanged)
    return laid, schema.Overlay(
        path=str(folder.resolve()),
        files=laid.files,
        native=native.of_overlay(folder, installed, python.vllm),
    )
