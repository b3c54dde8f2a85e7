"""Markdown as GitHub would read it: CommonMark with tables, strikethrough and links of bare addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token

READER = MarkdownIt("commonmark", {"linkify": True}).enable(["table", "strikethrough", "linkify"])

LIVE = re.compile(
    r"@|#\d|\bGH-\d|:[\w+-]+:|(?<!\d\.)\b[0-9a-f]{7,40}\b|https?://|www\.|[<>`$*_~|\[\]\\]|[^\x20-\x7e×–—…]"
)
"""What GitHub, though not CommonMark, makes something of outside of code: and all marks, to be safe.

Digits behind a point are no commit to it, as github.com/remarkjs/remark-github/issues/22 shows."""


def flat(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from flat(token.children or [])


def parsed(markdown: str) -> list[Token]:
    """All tokens of a document, inline ones too."""
    return list(flat(READER.parse(markdown)))


def shown(markdown: str) -> str:
    """The text that a reader sees, without its form."""
    return "".join(it.content for it in parsed(markdown) if it.type in ("text", "code_inline", "fence"))


def live(markdown: str) -> list[str]:
    """What in a document is more than text, or may be on GitHub: nothing in a report may."""
    found = [
        it.type for it in parsed(markdown) if it.type in ("link_open", "image", "html_inline", "html_block")
    ]
    return found + [it.content for it in parsed(markdown) if it.type == "text" and LIVE.search(it.content)]
