"""The formats in which a result can be printed."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, TextIO, cast

from localizer.diff.result import Result

FORMATS = ("text", "json", "markdown")


class Presenter(Protocol):
    """Writes a finished result; every module of this folder that is named in `FORMATS` has one."""

    def render(self, result: Result, stream: TextIO) -> None: ...


def render(form: str, result: Result, stream: TextIO) -> None:
    """Write `result` to `stream` in one of `FORMATS`."""
    presenter = cast(Presenter, import_module(f"localizer.report.{form}"))
    presenter.render(result, stream)
