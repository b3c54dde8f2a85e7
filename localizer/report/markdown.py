"""A result as GitHub-flavoured Markdown: the blocks of the text report, all text taken literally."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from localizer.diff.result import Result
from localizer.report import text
from localizer.report.blocks import MISSING, Block, Bullets, Line, Table
from localizer.report.gfm import cell, prose

LEVELS = {"verdict": "## ", "heading": "### "}


def render(result: Result, stream: TextIO) -> None:
    """Write the report of a diff."""
    write(text.document(result), stream)


def write(blocks: Iterable[Block], stream: TextIO) -> None:
    """Write blocks."""
    stream.write(of(blocks) + "\n")


def of(blocks: Iterable[Block]) -> str:
    """Blocks as Markdown, with an empty line between two."""
    return "\n\n".join(filter(None, map(_block, blocks)))


def _block(block: Block) -> str:
    if isinstance(block, Line):
        shown = prose(block.text)
        return LEVELS.get(block.role, "") + shown if shown else ""
    if isinstance(block, Bullets):
        return "\n".join(f"- {prose(item)}" for item in block.items)
    return _table(block)


def _table(table: Table) -> str:
    rule = ["---:" if column in table.right else "---" for column in range(len(table.header))]
    rows = [
        [cell(text, value=column in table.values and text != MISSING) for column, text in enumerate(row)]
        for row in table.rows
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in ([*map(cell, table.header)], rule, *rows))
