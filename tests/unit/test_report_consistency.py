"""One result says one thing: the same verdict, places and numbers in every format, and in the comment."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import CASES, PARENTS, WITHIN, controlled, within
from cases import result as of
from evidence import packed, plans
from markup import shown

from localizer.diff.result import Result
from localizer.report import summary
from localizer.report.comment import comment
from localizer.report.counts import count
from localizer.report.formats import encoded
from localizer.report.safe import clean
from localizer.report.scope import scope


def squeezed(text: str) -> str:
    return " ".join(text.split())


def read(form: str, result: Result) -> str:
    """What a person reads of a report."""
    if form == "png":
        pytest.importorskip("matplotlib", reason="the extra png is not installed")
        from matplotlib.text import Text

        from localizer.report.png import draw

        return squeezed(" ".join(text.get_text() for text in draw(result).findobj(Text)))
    text = encoded(form, result).decode()
    if form == "markdown":
        return squeezed(re.sub(r"`|\\(?=\|)", "", text))
    if form == "html":
        page, _, script = text.partition("</style>")[2].partition('<script type="application/json"')
        assert script
        return squeezed(html.unescape(re.sub(r"<[^>]+>", " ", page)))
    return squeezed(text)


def numbers(result: Result) -> Iterator[tuple[str, ...]]:
    """What a format must say, in one of these ways."""
    pairs, tokens = result.coverage.pairs, result.tokens
    yield (f"{result.verdict}: ", f"{result.verdict} ")
    if result.first is not None:
        yield (clean(result.first.site),)
        yield (f"request {clean(result.first.request)}, position {result.first.position}",)
    yield (
        f"{count(pairs.compared, 'row × site pair')} compared, {pairs.differ:,} differ",
        f"row × site pairs that differ: {pairs.differ:,} of {pairs.compared:,} compared",
        "nothing compared",
        "No row of any site was compared",
    )
    if tokens.requests and tokens.requests_differ:
        yield (
            f"{tokens.requests_differ:,} of {count(tokens.requests, 'request')} differ",
            f"requests with other tokens: {tokens.requests_differ:,} of {tokens.requests:,}",
            f"{tokens.requests_differ}/{tokens.requests} requests",
        )
    if result.attribution in summary.CONTROL:
        yield (summary.CONTROL[result.attribution],)


def result(name: str, root: Path) -> Result:
    if name in PARENTS:
        return controlled(name, root, cells=True)
    return within(name, root, cells=True) if name in WITHIN else of(name, root, cells=True)


@pytest.mark.parametrize("name", [*CASES, *PARENTS, *WITHIN])
def test_formats_say_the_same(tmp_path: Path, name: str) -> None:
    found = result(name, tmp_path)
    tree = json.loads(encoded("json", found))
    limits = scope(found)
    assert (tree["verdict"], tree["attribution"]) == (found.verdict, found.attribution)
    assert tree["scope"]["does_not_establish"] == limits.does_not_establish
    for form in ("text", "markdown", "html", "png"):
        text = read(form, found)
        for ways in numbers(found):
            assert any(way in text for way in ways), (form, ways, text)
        for sentence in [*limits.establishes, *limits.does_not_establish] if form != "png" else []:
            assert squeezed(sentence) in text, (form, sentence)


@pytest.mark.parametrize("name", [*CASES, *PARENTS])
def test_the_comment_says_the_same(tmp_path: Path, name: str) -> None:
    found = packed(tmp_path, plans(name))
    text = shown(comment(found))
    for limit in (2_600, 65_536):
        short = shown(comment(found, limit)) if limit < len(text) else text
        assert f"localizer: {found.result.verdict}" in short
        control = summary.CONTROL.get(found.result.attribution, "no ")
        assert control in short.partition("\n")[0] or found.result.verdict != "diverged"
        assert found.attachment.sha256 in short
    whole = result(name, tmp_path / "again")
    assert (found.result.verdict, found.result.attribution) == (whole.verdict, whole.attribution)
    pairs, tokens = whole.coverage.pairs, whole.tokens
    assert f"{count(pairs.compared, 'row × site pair')} compared, {pairs.differ:,} differ" in text
    if tokens.requests:
        assert f"Token parity: {tokens.requests_differ}/{tokens.requests} requests" in text
    if whole.first is not None:
        assert f"position {whole.first.position}" in text
        assert clean(whole.first.site) in text
