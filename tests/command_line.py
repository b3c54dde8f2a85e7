"""What the command line understands, without doing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from localizer.cli.main import localize


def understood(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The parameters of a command, by name; click's own error where it does not take them."""
    parent = click.Context(localize, **localize.context_settings)
    command = localize.get_command(parent, name)
    assert command is not None
    return command.make_context(name, list(arguments), parent=parent).params
