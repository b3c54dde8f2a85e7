"""Text that comes from a capture is data: nothing in it may become live on a terminal or in a document."""

from __future__ import annotations

_LIMIT = 400


def clean(text: str, limit: int = _LIMIT) -> str:
    """`text` in one line, everything that does not print as escapes, cut after `limit` characters."""
    shown = escaped(text[:limit])
    return shown if len(text) <= limit else shown + "..."


def escaped(text: str) -> str:
    """`text` in one line, everything that does not print (line ends, bidi marks) as escapes."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text.encode("utf-8", "backslashreplace").decode()
    )
