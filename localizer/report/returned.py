"""Tokens that two requests returned, side by side, ready to be set as a table."""

from __future__ import annotations

from typing import Any

from localizer.diff.cells import ReturnedTokens
from localizer.report.blocks import MISSING
from localizer.report.counts import count
from localizer.report.safe import clean


def table(found: ReturnedTokens) -> dict[str, Any]:
    """Title and columns of the table of two requests, and a sentence about what is left out of it."""
    longest = max(len(found.tokens.candidate), len(found.tokens.parent))
    columns = []
    for number in range(longest):
        pair = [
            str(side[number]) if number < len(side) else MISSING
            for side in (found.tokens.candidate, found.tokens.parent)
        ]
        output = found.start + number
        columns.append(
            {
                "position": found.prompt_tokens + output,
                "pair": pair,
                "mark": _mark(output, pair, found),
                "first": output == found.first,
            }
        )
    end = found.start + longest
    behind = max(found.lengths.candidate, found.lengths.parent) - end
    other = (
        "" if found.parent_request == found.request else f" (the other side's {clean(found.parent_request)})"
    )
    position = found.prompt_tokens + found.first
    cut = f"Outputs {found.start} to {end - 1}; {found.start:,} before and {behind:,} behind are left out."
    return {
        "title": f"{clean(found.request)}{other}: {found.differ:,} of {count(found.positions, 'token')} "
        f"{'differs' if found.positions == 1 else 'differ'}, the first at position {position} "
        f"(output {found.first})",
        "columns": columns,
        "cut": cut if found.start or behind else "",
    }


def _mark(output: int, pair: list[str], found: ReturnedTokens) -> str:
    """How a token compares; where one side did not finish, what lies behind its end does not."""
    if output >= found.positions:
        return "not compared"
    if output == found.first:
        return "≠ first"
    return "=" if pair[0] == pair[1] else "≠"
