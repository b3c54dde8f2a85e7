"""The picture: it is one, it is the same every time, and nothing in a capture is a formula."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from builders import Plan, pair, write
from cases import CASES, PARENTS, WITHIN

from localizer.diff import diff, diff_within
from localizer.diff.result import Result
from localizer.errors import LocalizerError
from localizer.report.formats import encoded
from localizer.store.reader import Capture

SIGNATURE = b"\x89PNG\r\n\x1a\n"

Made = Callable[[str], Result]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(name: str) -> Result:
        if name in WITHIN:
            return diff_within(Capture(write(tmp_path / name, Plan(**WITHIN[name]))), cells=True)
        plan, candidate = CASES[name] if name in CASES else (Plan(), PARENTS[name][0])
        return diff(*map(Capture, pair(tmp_path / name, plan, **candidate)), cells=True)

    return make


def words(found: Result) -> list[str]:
    """All text in the figure."""
    from matplotlib.text import Text

    from localizer.report.png import draw

    figure = draw(found)
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="the extra png is not installed")


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize("name", [*CASES, *PARENTS, *WITHIN])
def test_every_result_has_a_picture(made: Made, name: str) -> None:
    assert encoded("png", made(name)).startswith(SIGNATURE)


@pytest.mark.usefixtures("matplotlib")
def test_it_is_the_same_every_time_and_of_a_useful_size(made: Made) -> None:
    from PIL import Image

    found = made("diverged")
    blob = encoded("png", found)
    assert blob == encoded("png", found)
    picture = Image.open(io.BytesIO(blob))
    assert not {"Software", "Creation Time", "date"} & set(picture.info)
    assert 600 < picture.width < 3000
    assert 300 < picture.height < 4000


@pytest.mark.usefixtures("matplotlib")
def test_it_says_what_it_shows_and_what_it_does_not(made: Made) -> None:
    said = words(made("diverged"))
    text = " ".join(said)
    (title,) = [" ".join(line.split()) for line in said if line.startswith("diverged")]
    assert title.startswith("diverged: first at model.layers.18.self_attn.attn/query, request r02.02")
    for word in ("position", "site", "1 1-ulp", "k k-ulp", "equal", "model.layers.18.self_attn.attn/query"):
        assert word in said, word
    assert "Not shown: 5 further maps of requests, 0 of them with differences." in text
    assert "Not shown of r02.02: 12 lines." in text
    assert "No row of any site was compared." in " ".join(words(made("models")))


@pytest.mark.usefixtures("matplotlib")
def test_hostile_names_are_drawn_as_they_are(made: Made) -> None:
    found = made("attention")
    assert found.cells is not None
    names = [rf"$\frac{{\undefined}}${name}\x1b" for name in found.cells.sites]
    requests = [msgspec.structs.replace(found.cells.requests[0], request="$^$\n\x1b漢字\ud800")]
    cells = msgspec.structs.replace(found.cells, sites=names, requests=requests)
    hostile = msgspec.structs.replace(found, cells=cells)
    assert encoded("png", hostile).startswith(SIGNATURE)
    assert not [line for line in words(hostile) if not line.replace("\n", "").isprintable()]


def test_without_matplotlib_it_says_what_to_install(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(LocalizerError, match=r"pip install 'localizer\[png\]'"):
        encoded("png", made("identical"))
