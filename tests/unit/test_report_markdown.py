"""The report as Markdown."""

from __future__ import annotations

import io

import golden
import pytest
from cases import CASES, PARENTS, WITHIN, Made
from hypothesis import given
from hypothesis import strategies as st
from markup import live, parsed, shown

from localizer.diff.result import Result
from localizer.report import markdown, text
from localizer.report.blocks import Bullets, Line, Table
from localizer.report.formats import render


def rendered(found: Result) -> str:
    stream = io.StringIO()
    render("markdown", found, stream)
    return stream.getvalue()


@pytest.mark.parametrize("name", ["diverged", "identical", "hostile", "also-in-control", "within-diverged"])
def test_it_is_as_expected(made: Made, name: str) -> None:
    golden.check(f"diff-{name}.md", rendered(made(name)))


@pytest.mark.parametrize("name", [*CASES, *PARENTS, *WITHIN])
def test_it_says_what_the_text_says_and_nothing_is_live(made: Made, name: str) -> None:
    found = made(name)
    document = rendered(found)
    assert live(document) == []
    words = "".join(shown(document).split())
    for block in text.document(found):
        if isinstance(block, Table):
            told = [cell for row in (block.header, *block.rows) for cell in row]
        else:
            told = [block.text] if isinstance(block, Line) else list(block.items)
        for sentence in told:
            assert "".join(sentence.split()) in words


@given(st.lists(st.text(max_size=20), min_size=6, max_size=6))
def test_blocks_keep_their_form(texts: list[str]) -> None:
    blocks = [
        Line(f"identical: {texts[0]}", "verdict"),
        Line(f"Sites: {texts[1]}", "heading"),
        Line(texts[2]),
        Bullets([f"x {texts[3]}", f"y {texts[4]}"]),
        Table(["a", texts[5]], [[texts[0], texts[1]], ["", texts[2]]], right=frozenset({1})),
    ]
    document = markdown.of(blocks)
    assert live(document) == []
    types = [it.type for it in parsed(document)]
    for kind, number in (("heading_open", 2), ("list_item_open", 2), ("tr_open", 3), ("td_open", 4)):
        assert types.count(kind) == number, kind
