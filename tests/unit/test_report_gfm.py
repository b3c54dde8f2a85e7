"""Text in Markdown stays text, whatever it is: read back with a Markdown parser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markup import live, parsed, shown

from localizer.report.gfm import cell, code, fenced, prose
from localizer.report.safe import escaped

HOSTILE = [
    *("@octocat", "x@octocat.com", "#123", "org/repo#1", "GH-12", "0123456789abcdef", "deadbeef", "1234567"),
    *("https://evil.example/x", "www.evil.example", "[a](http://b)", "![a](b)", "<img src=x onerror=y>"),
    *("</details>", "<!-- x -->", "-->", "`", "``", "```", "a`b``c", "*a*", "_a_", "**", "~~a~~", "a|b", "|"),
    *("\\|", "\\\\|", "\\", ":smile:", ":+1:", "&lt;", "&#64;a", "$x$", "$`x`$", "[^1]", "> [!NOTE]", "# a"),
    *("1. a", "1) a", "- a", "+ a", "===", "---", "\ta", "    a", "a\nb", "\r", "\x1b[2J", "\u202egnp"),
    *("\u2028", "\ud800", "mailto:a@b.c", "http:", "//x.yz", "llama.py", "1.2.3.4", "(https://x.yz)", "(@a)"),
    *(",@a", "a:b:c", "x" * 300, "é@é", "\U0001f600", "\u200b@a", "javascript:alert(1)", "%0a", "[x]: y"),
]

texts = st.lists(
    st.one_of(st.sampled_from(HOSTILE), st.text(), st.text("`|\\ <>@#[]()!*_~&;:/.x1\n", max_size=12)),
    max_size=6,
).flatmap(lambda parts: st.sampled_from(["", " "]).map(lambda gap: gap.join(parts)))


def words(text: str) -> str:
    return " ".join(escaped(text).split())


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_hostile_is_shown_as_it_is(text: str) -> None:
    assert live(prose(text)) == []
    assert shown(prose(text)) == words(text)
    assert live(f"x {code(text)} y") == []


@given(texts)
def test_prose_is_one_paragraph_of_the_same_words(text: str) -> None:
    found = prose(text)
    assert "\n" not in found
    assert found.isprintable()
    assert shown(found) == words(text)
    assert live(found) == []
    assert {it.type for it in parsed(found)} <= {
        *("paragraph_open", "inline", "paragraph_close", "text", "code_inline")
    }


@given(texts, st.sampled_from(["- ", "### ", "", "**Word:** "]))
def test_prose_stays_what_it_is_behind_a_mark(text: str, before: str) -> None:
    assert shown(before + prose(text)).removeprefix("Word:").strip() == words(text)
    assert live(before + prose(text)) == []


@given(texts)
def test_code_is_one_span_of_the_same_text(text: str) -> None:
    found = parsed(f"x{' ' if code(text) else ''}{code(text)}")
    spans = [it.content for it in found if it.type == "code_inline"]
    assert spans == ([escaped(text)] if escaped(text).strip(" ") else [])


@given(st.lists(texts, min_size=2, max_size=4), st.booleans())
def test_a_cell_is_one_cell_of_the_same_words(row: list[str], value: bool) -> None:
    cells = [cell(text, value=value) for text in row]
    table = f"|{' a |' * len(row)}\n|{' --- |' * len(row)}\n| {' | '.join(cells)} |"
    found = parsed(table)
    assert [it.type for it in found].count("td_open") == len(row)
    assert [it.type for it in found].count("tr_open") == 2
    assert live(table) == []
    read = [it.content for number, it in enumerate(found) if it.type == "inline"][len(row) :]
    for text, inner in zip(row, read, strict=True):
        told = words(shown(inner)) if value else shown(inner)  # a value keeps its spaces
        assert told.replace("\\x7c", "|") == words(text).replace("\\x7c", "|")
        assert not value or len([it for it in parsed(inner) if it.type == "code_inline"]) <= 1


@given(texts)
def test_a_block_of_code_is_one_block(text: str) -> None:
    found = parsed(fenced(text, "sh"))
    assert [it.type for it in found] == ["fence"]
    assert found[0].content == "\n".join(map(escaped, text.split("\n"))) + "\n"


def test_what_is_plain_stays_plain() -> None:
    text = "Of what was compared, 1,234 of 2,000 rows (98.5%) differ; it doesn't end: k-fold, A × B — so."
    assert prose(text) == text
    assert prose("first at model.layers.5/query, request r00.00.") == (
        "first at `model.layers.5/query`, request `r00.00`."
    )


def test_numbers_and_ranges_are_calm() -> None:
    text = "candidate -0.2333984375, parent 1.4296875 (margin 0.5): q/k norm of layers 1–28, 16/44 requests"
    assert prose(text) == text
    assert prose("1234567 and 0x3fb7, 2.10.2.aba315b") == "`1234567` and `0x3fb7`, `2.10.2.aba315b`"


def test_a_call_keeps_its_end() -> None:
    assert prose("in f(x), (g(y)) and Intel(R)") == "in `f(x)`, (`g(y)`) and `Intel(R)`"
    assert prose("(see README.md).") == "(see `README.md`)."


def test_what_is_typed_together_is_one_span() -> None:
    assert prose("… and 4 more; --format json lists all") == "… and 4 more; `--format json` lists all"


def test_a_value_in_a_table_is_one_span() -> None:
    assert cell("Intel(R) Xeon(R) | x", value=True) == "`Intel(R) Xeon(R) \\| x`"
