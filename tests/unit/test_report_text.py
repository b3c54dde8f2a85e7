"""The text report."""

from __future__ import annotations

import io
import re
from pathlib import Path

import golden
import pytest
from cases import CASES, PARENTS, WITHIN, Made, result

from localizer.diff.result import Result
from localizer.report import sites, text
from localizer.report.formats import render
from localizer.report.scope import scope


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def plain(found: Result) -> str:
    stream = io.StringIO()
    render("text", found, stream)
    return stream.getvalue()


def on_terminal(found: Result, monkeypatch: pytest.MonkeyPatch, width: int = 100) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    render("text", found, stream)
    return stream.getvalue()


@pytest.mark.parametrize("name", CASES)
def test_plain_text_is_as_expected(made: Made, name: str) -> None:
    golden.check(f"diff-{name}.txt", plain(made(name)))


@pytest.mark.parametrize("name", PARENTS)
def test_what_controls_say_is_as_expected(made: Made, name: str) -> None:
    golden.check(f"diff-control-{name}.txt", plain(made(name)))


@pytest.mark.parametrize("name", WITHIN)
def test_one_capture_within_is_as_expected(made: Made, name: str) -> None:
    golden.check(f"diff-{name}.txt", plain(made(name)))


@pytest.mark.parametrize("name", ["diverged", "tokens", "workloads", "speculation", "draft", "hostile"])
def test_the_plan_is_as_expected(made: Made, name: str) -> None:
    """What stands before the report, which is the same with a plan as without."""
    shown = plain(made(f"plan {name}"))
    plan, report = shown.split("\nReport\n")
    golden.check(f"diff-plan-{name}.txt", f"{plan}\n")
    assert report == plain(made(name))


@pytest.mark.parametrize("name", ["within-diverged", "within-speculation"])
def test_the_plan_within_is_as_expected(made: Made, name: str) -> None:
    golden.check(f"diff-plan-{name}.txt", plain(made(f"plan {name}")).split("\nReport\n")[0] + "\n")


@pytest.mark.parametrize("name", CASES)
def test_the_first_line_is_the_verdict(made: Made, name: str) -> None:
    found = made(name)
    line = plain(found).splitlines()[0]
    assert line.startswith(f"{found.verdict}: ")


def test_the_first_line_names_site_request_position_and_step(made: Made) -> None:
    line = plain(made("diverged")).splitlines()[0]
    site = "model.layers.18.self_attn.attn/query"
    assert re.fullmatch(
        rf"diverged: first at {re.escape(site)}, request r02\.02, position 4 \(step \d+\)", line
    )


@pytest.mark.parametrize("name", CASES)
def test_nothing_that_could_steer_a_terminal_comes_out(made: Made, name: str) -> None:
    assert not [char for char in plain(made(name)).replace("\n", "") if not char.isprintable()]


def test_a_terminal_gets_colour(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = on_terminal(made("diverged"), monkeypatch)
    assert shown.startswith("\x1b[1;31mdiverged")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "[31m" not in on_terminal(made("identical"), monkeypatch)


def test_a_terminal_gets_the_same_words(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made("diverged")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(found, monkeypatch, 4000))
    words = shown.split()
    for line in plain(found).splitlines():
        for word in line.replace("  - ", " ").split():
            assert word in words


def test_markup_in_a_capture_means_nothing_on_a_terminal(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_terminal(made("hostile"), monkeypatch, 200)
    assert "[red]gone[/red]" in shown
    assert "\x1b[2J" not in shown
    assert "\x1b]0;" not in shown


def test_a_large_model_stays_readable(made: Made) -> None:
    lines = plain(made("diverged")).splitlines()
    start = lines.index("Sites, in execution order")
    length = lines[start:].index("")
    assert length <= sites.SHOWN + 8
    assert len(lines) < 70
    assert len(made_identical := plain(result("identical", Path("more"))).splitlines()) < 40
    assert any("(133 sites)" in line for line in made_identical)


def test_many_settings_are_cut(made: Made) -> None:
    import msgspec

    from localizer.diff.result import Difference

    found = made("identical")
    many = [Difference(setting=f"engine.x{index}", candidate="y" * 99, parent=None) for index in range(20)]
    shown = plain(msgspec.structs.replace(found, differences=many))
    assert "… and 8 more" in shown
    assert "engine.x11" in shown
    assert "engine.x12" not in shown
    assert "y" * (text.WIDEST_VALUE + 1) not in shown


@pytest.mark.parametrize("name", CASES)
def test_the_scope_says_both(made: Made, name: str) -> None:
    found = scope(made(name))
    assert found.does_not_establish
    assert any("KV cache" in line for line in found.does_not_establish)
    assert any("performance" in line.lower() for line in found.does_not_establish)


def test_the_scope_never_reaches_past_coverage(made: Made) -> None:
    said = scope(made("selected"))
    assert any("layers that were not recorded" in line for line in said.does_not_establish)
    assert any("How large" in line for line in said.does_not_establish)
    said = scope(made("tokens"))
    assert not any("pairs" in line for line in said.establishes)
    assert any("In which tensor" in line for line in said.does_not_establish)
    said = scope(made("killed"))
    assert any("should have been recorded" in line for line in said.does_not_establish)
    said = scope(made("models"))
    assert not any("pairs" in line or "weights" in line for line in said.establishes)
