"""Text as GitHub-flavoured Markdown in which nothing is live: what a reader sees is the text itself.

A word goes in bare only if it is of letters, or a number; any other stands in a code span, in which GitHub
makes no link, mention, reference, emoji, formula or HTML of anything. Digits behind a point are no commit to
GitHub, as github.com/remarkjs/remark-github/issues/22 shows.
"""

from __future__ import annotations

import re

from localizer.report.safe import escaped

_WORDS = re.compile(r"\[\d+(?:, \d+)*\][^ ]*|--format json|[^ ]+")
"""An index such as `[0, 3]` is one word, an option with its value too."""

_WORD = re.compile(r"(\(*)(.*?)([),.;:?]*)")
_PLAIN = re.compile(
    r"[A-Za-z]+(?:['-][A-Za-z]+)*|[a-z]/[a-z]|[×–—…]"
    r"|\d{1,3}(?:,\d{3})+|-?\d{1,6}(?:\.\d{1,20})?%?|\d{1,6}[/–]\d{1,6}"
)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
"""What GitHub may take for a commit, words such as `defaced` too."""

_TICKS = re.compile(r"`+")


def prose(text: str) -> str:
    """A sentence in one line; words that could be live, or look like names, in code spans."""
    words = _WORDS.findall(escaped(text))
    return " ".join(_word(word, first=not number) for number, word in enumerate(words))


def code(text: str) -> str:
    """A value as one code span; empty for an empty one."""
    text = escaped(text)
    fence = "`" * (1 + max((len(run) for run in _TICKS.findall(text)), default=0))
    if not text.strip(" "):
        return ""
    padded = text[0] in "` " or text[-1] in "` "  # Markdown takes one space off each end
    return f"{fence} {text} {fence}" if padded else f"{fence}{text}{fence}"


def cell(text: str, *, value: bool = False) -> str:
    """`prose`, or `code` of a value, inside a table, whose cells end at a bar.

    A bar behind a backslash, of which renderers do not agree whether it is escaped, is shown as an escape.
    """
    shown = code(text) if value else prose(text)
    return re.sub(r"(\\?)\|", lambda found: "\\\\x7c" if found[1] else "\\|", shown)


def fenced(lines: str, language: str = "") -> str:
    """Lines of code as a block; each is made of printable characters."""
    shown = "\n".join(map(escaped, lines.split("\n")))
    fence = "`" * max(3, 1 + max((len(run) for run in _TICKS.findall(shown)), default=0))
    return f"{fence}{language}\n{shown}\n{fence}"


def _word(word: str, first: bool) -> str:
    found = _WORD.fullmatch(word)
    assert found is not None
    before, core, after = found.groups()
    if after.startswith(")") and core.count("(") > core.count(")"):  # the end of a call, of `Intel(R)`
        core, after = f"{core})", after[1:]
    if not core:
        return code(word)
    plain = _PLAIN.fullmatch(core) and not _COMMIT.fullmatch(core)
    numbered = first and not before and core.isdigit() and after[:1] in (".", ")")  # would begin a list
    return f"{before}{core if plain and not numbered else code(core)}{after}"
