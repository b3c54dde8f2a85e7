"""Blocks on a terminal: rich's wrapping, tables and colours (rich itself honours NO_COLOR)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from localizer.report.blocks import Block, Bullets, Line

COLOURS = {"identical": "bold green", "diverged": "bold red", "inconclusive": "bold yellow"}


def write(blocks: Sequence[Block], stream: TextIO) -> None:
    """Print blocks; all text is taken literally, markup in it means nothing."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    for block in blocks:
        if isinstance(block, Line):
            console.print(_line(block))
        elif isinstance(block, Bullets):
            for item in block.items:
                grid = RichTable.grid(padding=(0, 1))
                grid.add_row(Text("•"), Text(item))
                console.print(Padding(grid, (0, 0, 0, 2)))
        else:
            table = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
            for column, name in enumerate(block.header):
                justify = "right" if column in block.right else "left"
                table.add_column(Text(name), justify=justify, overflow="fold")  # type: ignore[arg-type]
            for number, row in enumerate(block.rows):
                table.add_row(*map(Text, row), style="red" if number in block.loud else None)
            console.print(Padding(table, (0, 0, 0, 2)))


def _line(line: Line) -> Text:
    if line.role == "verdict":
        return Text(line.text, style=COLOURS.get(line.text.partition(":")[0], "bold"))
    if line.role == "heading":
        return Text("\n" + line.text, style="bold")
    return Text(line.text)
