"""The HTML report, as far as no browser is needed: tests/integration/test_report_browser.py opens it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html as entities
import io
import json
import re
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import golden
import msgspec
import pytest
from builders import Plan, attention, bump, pair, write
from cases import CASES, PARENTS, WITHIN

from localizer.diff import diff, diff_within
from localizer.diff.cells import EQUAL
from localizer.diff.result import Difference, Result
from localizer.report import text
from localizer.report.formats import render
from localizer.report.html import embedded
from localizer.report.maps import maps
from localizer.report.returned import table
from localizer.report.states import STATES
from localizer.store.reader import Capture

LIVE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028\u202e\x1b[2J{{ 7*7 }}"


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of style and script elements, word by word."""

    VOID = frozenset({"meta", "link", "input", "img", "br"})

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.inside: list[str] = []
        self.raw: dict[str, list[str]] = {"style": [], "script": []}
        self.feed(page)
        self.close()
        assert not self.inside, "an element was not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID and not (self.inside[-1:] == ["svg"] and tag == "rect"):
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.inside.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.inside and self.inside[-1] in self.raw:
            self.raw[self.inside[-1]].append(data)
        else:
            self.words += data.split()


Made = Callable[[str], Result]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Gives the result of a case with its cells, made once and always under the relative path `captures`."""

    @cache
    def make(name: str) -> Result:
        with contextlib.chdir(tmp_path_factory.mktemp("case")):
            return compared(name, Path("captures"))

    return make


def compared(name: str, root: Path) -> Result:
    """The result of a case with its cells."""
    if name in WITHIN:
        return diff_within(Capture(write(root, Plan(**WITHIN[name]))), cells=True)
    if name in PARENTS:
        candidate, controls = PARENTS[name]
        plans = [Plan(**{"name": f"parent-{number}"} | more) for number, more in enumerate(controls, 2)]
        further = [Capture(write(root, plan)) for plan in plans]
        return diff(*map(Capture, pair(root, Plan(), **candidate)), further, cells=True)
    plan, candidate = CASES[name]
    return diff(*map(Capture, pair(root, plan, **candidate)), cells=True)


def page(found: Result) -> str:
    stream = io.StringIO()
    render("html", found, stream)
    return stream.getvalue()


def data_of(blob: str) -> dict[str, object]:
    """What the script of a page draws from."""
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', blob, re.DOTALL)
    assert len(found) == 1
    return dict(json.loads(found[0]))


def readable(blob: str) -> str:
    """A page without its style and script, its data spelled out."""
    data = json.dumps(data_of(blob)).replace("], [", "],\n[")
    shown = re.sub(r"(<style>).*?(</style>)", r"\1\2", blob, flags=re.DOTALL)
    shown = re.sub(r"<script\b.*?</script>\n", "", shown, flags=re.DOTALL)
    shown = re.sub(r"sha256-[\w+/=]+", "sha256-…", shown)
    shown = "\n".join(line.strip() for line in shown.split("\n") if line.strip())
    return f"{shown}\n{data}\n"


@pytest.mark.parametrize("name", ["attention", "within-diverged"])
def test_the_page_is_as_expected(made: Made, name: str) -> None:
    golden.check(f"report-{name}.html", readable(page(made(name))))


@pytest.mark.parametrize("name", [*CASES, *PARENTS, *WITHIN])
def test_it_says_all_that_the_text_report_says(made: Made, name: str) -> None:
    found = made(name)
    words = set(Page(page(found)).words)
    for line in (line for block in text.document(found) for line in text.plain(block)):
        for word in line.split():
            bare = word.removesuffix(":")
            assert {word, bare} & words or set(word) <= {"#", "-"}, f"{word!r} of {line!r}"
    assert Page(page(found)).words.count(found.verdict) >= 1


@pytest.mark.parametrize("name", [*CASES, *PARENTS, *WITHIN])
def test_nothing_is_loaded_and_nothing_else_runs(made: Made, name: str) -> None:
    blob = page(made(name))
    parsed = Page(blob)
    for tag, attributes in parsed.tags:
        assert tag not in {"iframe", "object", "embed", "base", "form", "img", "audio", "video"}
        assert not [key for key in attributes if key.startswith("on") or key in ("style", "src", "srcset")]
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
    policy = next(a["content"] for t, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    (style,), (_, script) = parsed.raw["style"], parsed.raw["script"]
    for code in (style, script):
        assert "url(" not in code
        assert "@import" not in code
        assert "http" not in code
        assert f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'" in policy
    for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert danger not in script
    assert not [char for char in blob.replace("\n", "") if not char.isprintable()]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    plan = Plan(state="incomplete", reasons=(LIVE,), vllm=LIVE, environment={LIVE: LIVE})
    one, other = pair(
        tmp_path, plan, engine={LIVE: LIVE}, changes={("r01.00", 4, attention(1, "key")): bump()}
    )
    found = diff(Capture(one), Capture(other), cells=True)
    assert found.cells is not None
    cells = msgspec.structs.replace(found.cells, sites=[f"{LIVE}{name}" for name in found.cells.sites])
    first = msgspec.structs.replace(cells.requests[0], request=LIVE)
    cells = msgspec.structs.replace(cells, requests=[first, *cells.requests[1:]])
    found = msgspec.structs.replace(
        found, cells=cells, differences=[Difference(setting=LIVE, candidate=LIVE, parent={LIVE: [LIVE]})]
    )
    blob = page(found)
    assert blob.count("<script") == blob.count("</script>") == 2
    assert "<img" not in blob
    assert not [char for char in blob.replace("\n", "") if not char.isprintable()]
    tags = Page(blob).tags
    assert not [attributes for _, attributes in tags if "onerror" in attributes]
    assert "49" not in Page(blob).words
    assert "alert(1)" in entities.unescape(blob)
    data = data_of(blob)
    assert "</script>" in str(data["sites"])  # escaped where it stands, whole when it is read


@pytest.mark.parametrize(
    "text", ["</script>", "<!--<script>", "]]>", "\u2028\u2029", "&amp;", "\ud800", "\x00"]
)
def test_embedded_json_cannot_end_its_element(text: str) -> None:
    blob = embedded({text: [text]})
    assert blob.isascii()
    assert not set(blob) & set("<>&")
    assert json.loads(blob) == {text: [text]}


def test_the_map_holds_what_the_result_says(made: Made) -> None:
    found = made("diverged")
    assert found.cells is not None
    data = data_of(page(found))
    codes = [state.code for state in STATES]
    assert [name for name, _ in data["states"]] == [state.name for state in STATES]
    assert [name for name, *_ in data["sites"]] == found.cells.sites
    for one, item in zip(data["maps"], found.cells.requests, strict=True):
        assert one["request"] == item.request
        for (position, step, kind, parent, pattern), row in zip(one["rows"], item.rows, strict=True):
            assert (position, step, kind) == (row.position, row.step, row.kind)
            assert parent == (row.parent_request and [row.parent_request, row.parent_step])
            assert "".join(codes[ord(char) - ord("a")] for char in one["patterns"][pattern]) == row.states
        assert [(row, site) for row, site, *_ in one["cells"]] == [(c.row, c.site) for c in item.cells]


def test_without_javascript_the_map_is_there(made: Made) -> None:
    found = made("batches")
    blob = page(found)
    static = re.findall(r"<noscript>(.*?)</noscript>", blob, re.DOTALL)[0]
    drawn = re.findall(r'<td class="s s(\d+) n\d+"(?: colspan="(\d+)")?', static)
    loud = sum(int(rows or 1) for state, rows in drawn if 0 < int(state) < 10)
    assert loud == found.coverage.pairs.differ
    fields = sum(len(states) for one in maps(found) for _, states in one.lines)
    assert sum(int(rows or 1) for _, rows in drawn) == fields


def test_states_are_told_by_more_than_colour() -> None:
    signs = [state.sign for state in STATES if state.sign]
    assert len(signs) == len(set(signs)) == len(STATES) - 2
    assert STATES[0].code == EQUAL

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for state in STATES:
        for ground, ink in (state.light, state.dark):
            low, high = sorted((luminance(ground), luminance(ink)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, state.name


def test_many_settings_are_listed(made: Made) -> None:
    found = made("identical")
    many = [Difference(setting=f"engine.x{i}", candidate=i, parent=None) for i in range(60)]
    words = Page(page(msgspec.structs.replace(found, differences=many))).words
    assert {f"engine.x{i}" for i in range(60)} <= set(words)


def test_behind_the_end_of_an_unfinished_request_no_token_is_compared(tmp_path: Path) -> None:
    outputs = {"r00.00": [9, *Plan().tokens("r00.00")[1:2]]}
    one, other = pair(tmp_path, outputs=outputs, unfinished=frozenset({"r00.00"}))
    found = diff(Capture(one), Capture(other), cells=True).returned
    assert found is not None
    marks = [column["mark"] for column in table(found.requests[0])["columns"]]
    assert marks == ["≠ first", "=", "not compared", "not compared"]


def test_a_result_without_cells_has_no_map(made: Made) -> None:
    found = msgspec.structs.replace(made("diverged"), cells=None, returned=None)
    assert "There is no map" in page(found)
