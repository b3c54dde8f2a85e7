"""The HTML report in a real browser: headless Chromium, driven through its own driver."""

from __future__ import annotations

import importlib.resources
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localizer.diff import diff
from localizer.diff.cells import Cells, MappedRequest, MappedRow
from localizer.diff.result import Result
from localizer.report.formats import encoded
from localizer.store.reader import Capture

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

ROOT = Path(__file__).parents[2]
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="neither chromium nor chromedriver is on PATH (apt-get install)",
)

QUIET = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser with a profile of its own, that logs its console and every request."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Open:
    """Opens the page of a result, of a width, in the light or the dark, with or without JavaScript."""

    def open_page(result: Result, *, width: int = 1200, dark: bool = False, script: bool = True) -> Any:
        path = tmp_path / "report.html"
        path.write_bytes(encoded("html", result))
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})
        for kind in ("browser", "performance"):  # forget what was before
            browser.get_log(kind)
        browser.get(path.as_uri())
        return browser

    return open_page


@pytest.fixture(scope="module")
def result() -> Result:
    """That of the pair in the repository."""
    one, other = (Capture(ROOT / "captures" / name / "0001") for name in ("candidate", "parent"))
    return diff(one, other, cells=True)


@pytest.fixture(scope="module")
def large(result: Result) -> Result:
    """A map of 600 sites and 512 rows, every other site of which differs, and 40 requests."""
    assert result.cells is not None
    sites = [f"model.layers.{number // 4}.module/part{number % 4}" for number in range(600)]
    rows = [
        MappedRow(
            position=number,
            step=number,
            kind="prefill" if number < 100 else "decode",
            parent_request="r00.00",
            parent_step=number,
            states="=" * 300 + "v=" * 150 if number > 40 else "=" * 600,
        )
        for number in range(512)
    ]
    requests = [
        MappedRequest(
            request=f"r{number:02d}.00",
            rows=rows,
            rows_before=0,
            rows_after=1000,
            differ=70650,
            cells=[],
            cells_left_out=70650,
        )
        for number in range(40)
    ]
    cells = Cells(sites=sites, requests=requests, requests_left_out=3, cells_left_out=1)
    return msgspec.structs.replace(result, cells=cells)


def complaints(page: Any) -> list[str]:
    return [entry["message"] for entry in page.get_log("browser")]


def requested(page: Any) -> list[str]:
    """Addresses that the page asked for."""
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    return [it["params"]["request"]["url"] for it in events if it["method"] == "Network.requestWillBeSent"]


def text(page: Any, selector: str) -> str:
    return str(page.execute_script("return document.querySelector(arguments[0]).innerText", selector))


def focused(page: Any) -> tuple[str, str]:
    """Which field has the focus, and what it is called."""
    script = (
        "const e = document.activeElement; return [e.dataset.at || '', e.getAttribute('aria-label') || '']"
    )
    at, label = page.execute_script(script)
    return at, label


def press(page: Any, *keys: str) -> None:
    chain = webdriver.ActionChains(page)
    for key in keys:
        chain.send_keys(key)
    chain.perform()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 375])
def test_it_opens_without_a_complaint_or_a_request(
    opened: Open, result: Result, tmp_path: Path, width: int, dark: bool
) -> None:
    page = opened(result, width=width, dark=dark)
    assert complaints(page) == []
    assert [url for url in requested(page) if not url.startswith("data:")] == [
        (tmp_path / "report.html").as_uri()
    ]
    assert text(page, "h1").split() == f"≠ diverged {text(page, '.headline')}".split()
    assert "model.layers.5.self_attn.attn/query" in text(page, "h1")
    wide = page.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1] == width, "the page scrolls sideways"
    colours = page.execute_script(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    )
    brightness = [sum(map(int, colour[4:-1].split(","))) for colour in colours]
    assert (brightness[0] < brightness[1]) == dark


def test_a_cell_tells_its_numbers_by_mouse(opened: Open, result: Result) -> None:
    page = opened(result)
    assert result.cells is not None
    assert result.first is not None
    assert "model.layers.5.self_attn.attn/query" in text(page, "#cell h3")  # the first difference, at once
    item = result.cells.requests[0]
    cell = next(cell for cell in item.cells if cell.class_ == "k-ulp")
    site, row = result.cells.sites[cell.site], item.rows[cell.row]
    lines = "return [...document.querySelectorAll('#grid tbody tr')].map(line => line.innerText)"
    line = next(i for i, words in enumerate(page.execute_script(lines)) if site in words)
    page.find_element("css selector", f'[data-at="{line} {cell.row}"]').click()
    shown = text(page, "#cell")
    assert shown.startswith(site)
    assert cell.values is not None
    assert cell.first_element is not None
    for value in (
        *(item.request, str(row.position), row.kind, "k-ulp", f"{cell.elements_differ} of {cell.elements}"),
        *(cell.values.candidate.hex, cell.values.candidate.decimal),
        *(cell.values.parent.hex, cell.values.parent.decimal),
        str(cell.first_element),
    ):
        assert value in shown, value
    assert focused(page) == (f"{line} {cell.row}", "k-ulp")
    assert page.find_element("css selector", "#cell").get_attribute("aria-live") == "polite"


def test_the_map_is_walked_by_keyboard(opened: Open, result: Result) -> None:
    from selenium.webdriver.common.keys import Keys

    page = opened(result)
    script = "return document.querySelectorAll('#grid [tabindex=\"0\"]').length"
    assert page.execute_script(script) == 1
    page.execute_script("document.querySelector('#every').focus()")
    press(page, Keys.TAB)
    if not focused(page)[0]:  # the region that scrolls may take the focus first
        press(page, Keys.TAB)
    assert focused(page) == ("1 0", "value")
    press(page, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert focused(page) == ("2 1", "value")
    assert "attn/query" in text(page, "#cell h3")  # told when asked
    press(page, Keys.ENTER)
    assert text(page, "#cell h3") == "model.layers.5.self_attn.attn/key"
    outline = page.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    press(page, Keys.HOME)
    assert focused(page)[0] == "2 0"
    press(page, Keys.ARROW_LEFT, Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_UP)
    assert focused(page) == ("0 0", "equal")
    press(page, " ")
    assert "22 sites: model/input_ids … model.layers.4.self_attn.attn/output" in text(page, "#cell h3")
    webdriver.ActionChains(page).key_down(Keys.CONTROL).send_keys(Keys.END).key_up(Keys.CONTROL).perform()
    assert focused(page)[0] == "15 10"
    assert page.execute_script(script) == 1


def test_another_request_and_every_site(opened: Open, result: Result) -> None:
    page = opened(result)
    assert result.cells is not None
    count = "return document.querySelectorAll('#grid tbody tr').length"
    assert page.execute_script(count) == 16
    page.find_element("css selector", "#every").click()
    assert page.execute_script(count) == len(result.cells.sites) == 37
    last = result.cells.requests[-1]
    page.find_elements("css selector", "#which option")[-1].click()
    assert f"request\n{last.request}" in text(page, "#cell")
    assert "2 rows of this request have no counterpart." in text(page, "#notes")
    labels = "return [...document.querySelectorAll('#grid td[aria-label=\"not compared\"]')].length"
    assert page.execute_script(labels) == 2 * 37


def test_the_first_difference_is_in_sight(opened: Open, result: Result) -> None:
    """However far to the right it lies, and beside the names, which stay where they are."""
    assert result.cells is not None
    item = result.cells.requests[0]
    rows = [msgspec.structs.replace(item.rows[0], states="=" * 37)] * 100 + list(item.rows)
    cells = [msgspec.structs.replace(cell, row=cell.row + 100) for cell in item.cells]
    moved = [msgspec.structs.replace(item, rows=rows, cells=cells)]
    found = msgspec.structs.replace(result, cells=msgspec.structs.replace(result.cells, requests=moved))
    for width in (1200, 375):
        page = opened(found, width=width)
        script = """
            const sides = (selector) => {
                const box = document.querySelector(selector).getBoundingClientRect();
                return [box.left, box.right];
            };
            return [sides('#grid tbody th'), sides('#grid [aria-selected]'), sides('#view .scroll')]"""
        (_, names), (left, right), (_, end) = page.execute_script(script)
        assert names <= left < right <= end


def test_a_tall_map_scrolls_beneath_its_positions(opened: Open, result: Result, large: Result) -> None:
    """The first difference is in sight, positions stay so, and the window has room for a cell's numbers."""
    from selenium.webdriver.common.keys import Keys

    assert result.cells is not None
    assert large.cells is not None
    first = msgspec.structs.replace(result.cells.requests[0].cells[0], row=50, site=500)
    request = msgspec.structs.replace(large.cells.requests[0], cells=[first])
    found = msgspec.structs.replace(large, cells=msgspec.structs.replace(large.cells, requests=[request]))
    page = opened(found)
    script = """
        const sides = (selector) => {
            const box = document.querySelector(selector).getBoundingClientRect();
            return [box.top, box.bottom];
        };
        return [sides('#view .scroll'), sides('#grid thead'), sides(arguments[0]), sides('#cell')]"""
    (top, end), _, (above, below), cell = page.execute_script(script, "#grid [aria-selected]")
    assert top < above < below < end
    assert cell[1] - top < 900, "box and numbers do not fit into the window"
    page.execute_script("document.querySelector('#grid [tabindex=\"0\"]').focus()")
    for _ in range(20):  # further up than was in sight
        press(page, Keys.ARROW_UP)
        (top, end), (head, names), (above, below), _ = page.execute_script(script, ":focus")
        assert top == head < names <= above < below <= end


def test_a_large_map_is_drawn_in_parts(opened: Open, large: Result) -> None:
    page = opened(large)
    assert complaints(page) == []
    fields = "return document.querySelectorAll('#grid td[data-at]').length"
    assert 0 < page.execute_script(fields) <= 12_000
    first = text(page, "#range")
    assert first.endswith("of 512")
    page.find_element("css selector", "#later").click()
    assert text(page, "#range") != first
    assert page.execute_script(fields) <= 12_000
    field = page.find_element("css selector", '#grid td[aria-label="value"]')
    page.execute_script("arguments[0].click()", field)
    assert "Not described here" in text(page, "#cell")
    assert "3 further requests without a map" in text(page, "#map")
    assert len(page.find_elements("css selector", "#which option")) == 40


def test_without_javascript_all_but_the_numbers_is_there(opened: Open, result: Result) -> None:
    page = opened(result, script=False)
    page.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})  # to look, not to run it
    body = text(page, "body")
    for words in (
        "diverged",
        "model.layers.5.self_attn.attn/query, request r00.00, position 0",
        "What else differs",
        "overlay.model_executor/models/llama.py",
        "It does not establish",
        "Quality of the output or performance.",
        "Without JavaScript the map shows no numbers",
        "r01.03: 3 of 6 tokens differ",
    ):
        assert words in body, words
    assert not page.find_element("css selector", "#view").is_displayed()
    assert len(page.find_elements("css selector", "noscript table.map")) == 5


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 375])
def test_it_is_accessible_as_far_as_axe_sees(opened: Open, result: Result, width: int, dark: bool) -> None:
    pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
    axe = (importlib.resources.files("axe_core_python") / "axe.min.js").read_text()
    page = opened(result, width=width, dark=dark)
    # By the debugger: the page's own policy lets no other script in.
    page.execute_cdp_cmd("Runtime.evaluate", {"expression": f"{axe}\n;undefined"})
    run = "const done = arguments[0]; axe.run().then(found => done(found), error => done(String(error)))"
    found = page.execute_async_script(run)
    assert not isinstance(found, str), found
    assert len(found["passes"]) > 15
    wrong = [f"{it['id']}: {node['html'][:200]}" for it in found["violations"] for node in it["nodes"]]
    assert wrong == []


def test_this_test_would_see_a_request(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "other.html"
    path.write_text("<!doctype html><title>x</title><img src='other.png'><script>nothing()</script>")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(path.as_uri())
    assert [url for url in requested(browser) if url.endswith("other.png")]
    assert any("nothing is not defined" in message for message in complaints(browser))
