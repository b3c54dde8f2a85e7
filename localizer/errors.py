"""The errors that reach a person: one clear sentence, an exit code, never a traceback."""

from __future__ import annotations


class LocalizerError(Exception):
    """Something a person can act on; `str(error)` is one sentence with the next step."""

    exit_code = 2


class NotACapture(LocalizerError):
    """The path holds no capture, or the name is unknown."""


class DamagedCapture(LocalizerError):
    """A capture whose files contradict its own records: cut, altered, or malformed."""


class CaptureFailed(LocalizerError):
    """The source could not be captured; what was recorded is kept and incomplete."""


class Interrupted(LocalizerError):
    """The person stopped the run; the exit code is the shell's for SIGINT."""

    exit_code = 130
