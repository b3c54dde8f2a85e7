"""The formats in which a result can be written."""

from __future__ import annotations

import io
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, Protocol, TextIO, cast

if TYPE_CHECKING:
    from localizer.diff.result import Result

TEXT = "text"

SUFFIXES = {TEXT: ".txt", "json": ".json", "markdown": ".md", "html": ".html", "png": ".png"}
"""Every format, with the suffix of its files."""

BINARY = frozenset({"png"})
"""Formats that are no text."""


class Presenter(Protocol):
    """Writes a finished result; the module of this folder that a format is called after has one."""

    def render(self, result: Result, stream: IO[Any]) -> None: ...


def render(form: str, result: Result, stream: TextIO) -> None:
    """Write `result` to `stream` in a format that is text."""
    _presenter(form).render(result, stream)


def encoded(form: str, result: Result) -> bytes:
    """`result` in any format, as the bytes of a file."""
    if form in BINARY:
        blob = io.BytesIO()
        _presenter(form).render(result, blob)
        return blob.getvalue()
    text = io.StringIO()
    render(form, result, text)
    return text.getvalue().encode("utf-8", "backslashreplace")


def _presenter(form: str) -> Presenter:
    return cast(Presenter, import_module(f"localizer.report.{form}"))
