"""A diff or a run as a comment on a pull request: the verdict, its evidence in brief, and its limits.

What a comment may not hold is left out whole, in the order of `DROPPED`, and named; verdict, reasons, token
parity, scope and attachment never are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from localizer.errors import LocalizerError
from localizer.report import history, markdown
from localizer.report.blocks import Block, Bullets, Line
from localizer.report.parts import Evidence, Part, parts

DROPPED = (
    *("settings", "rows", "requests", "histogram", "sites", "controls", "evidence", "coverage", "captures"),
    *("parity table", "commands", "runs", "environment", "probes", "repeats and control"),
)
"""What is left out where a comment would be too long, the first first."""

CUTS = (400, 160, 80)
"""Characters of a sentence, tried in turn where what is never left out is still too long."""


def whole(found: Evidence, before: str | None = None) -> str:
    """The comment with its marker and what is told of earlier verdicts; see `localizer.report.history`."""
    told = history.told(
        when=next(iter(found.captures.values())).open.created,
        headline=found.headline,
        scope=found.scope,
        attachment=found.attachment.name,
        sha256=found.attachment.sha256,
    )
    return history.body(partial(comment, found), told, before)


def comment(found: Evidence, limit: int = history.LIMIT) -> str:
    """The comment, of at most `limit` bytes.

    Raises:
        LocalizerError: what is never left out is longer; of what localizer makes it is not.
    """
    said = [part for part in parts(found) if _markdown(part, None)]
    for number in range(len(DROPPED) + 1):
        kept = _without(said, DROPPED[:number])
        shown = _joined(kept, None)
        if len(shown.encode()) <= limit:
            return shown
    for most in CUTS:
        shown = _joined(kept, most)
        if len(shown.encode()) <= limit:
            return shown
    raise LocalizerError("The comment would be too long even without its details; please report this.")


def _without(said: Sequence[Part], dropped: Sequence[str]) -> list[Part]:
    there = {part.key for part in said}
    names = [name for name in dropped if name in there]
    kept = [part for part in said if part.key not in names]
    if names:
        note = Line(
            f"Left out, since a comment has a limit: {', '.join(names)}; the archive holds what they told."
        )
        kept.append(Part("", [note]))
    return kept


def _joined(said: Sequence[Part], most: int | None) -> str:
    shown = ""
    for inner in filter(None, (_markdown(part, most) for part in said)):
        lists = inner.startswith("- ") and shown.rpartition("\n")[2].startswith("- ")  # go on as one
        shown += ("\n" if lists else "\n\n" if shown else "") + inner
    return shown if most is None else f"{shown}\n\nSentences were cut to {most} characters."


def _markdown(part: Part, most: int | None) -> str:
    blocks = part.blocks if most is None else [_cut(block, most) for block in part.blocks]
    inner = "\n\n".join(filter(None, (markdown.of(blocks), part.literal)))
    if not inner or not part.folded:
        return inner
    return f"<details>\n<summary>{part.folded}</summary>\n\n{inner}\n\n</details>"


def _cut(block: Block, most: int) -> Block:
    def short(sentence: str) -> str:
        return sentence if len(sentence) <= most else sentence[:most] + "…"

    if isinstance(block, Line):
        return replace(block, text=short(block.text))
    if isinstance(block, Bullets):
        return Bullets([short(item) for item in block.items])
    return replace(block, rows=[[short(cell) for cell in row] for row in block.rows])
