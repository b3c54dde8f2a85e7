"""A result as a picture: the maps of what differs first, under the verdict. Needs the extra `png`."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from localizer.diff.cells import NOT_COMPARED
from localizer.diff.result import INCONCLUSIVE, Result
from localizer.errors import LocalizerError
from localizer.report import glance, maps, wording
from localizer.report.counts import count
from localizer.report.maps import QUIET, Map
from localizer.report.safe import clean
from localizer.report.states import NUMBER, STATES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path

MAPS_SHOWN = 3
"""Maps that are drawn, the causally first."""

LINES_SHOWN = 48
"""Lines of a map that are drawn: the last without a difference, and what follows."""

ROWS_SHOWN = 96
"""Rows of a map that are drawn."""

REASONS_SHOWN = 4
"""Reasons beside a verdict that are told."""

CELL, LETTER, DPI = 0.17, 0.056, 130
"""Inches of a cell, of a letter in the names of sites, and dots an inch."""


def render(result: Result, stream: BinaryIO) -> None:
    """Write the picture.

    Raises:
        LocalizerError: matplotlib is not there.
    """
    try:
        import matplotlib
    except ImportError:
        raise LocalizerError(
            "A report in png needs matplotlib: pip install 'localizer[png]', or take --format html."
        ) from None
    # What a capture says is no formula, and a sign that the font lacks is drawn as a box.
    with matplotlib.rc_context({"text.parse_math": False, "font.size": 8}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        figure = draw(result)
        figure.savefig(stream, format="png", dpi=DPI, metadata={"Software": None})


def draw(result: Result) -> Figure:
    """The figure, which nobody shows on a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    every = maps.maps(result)
    drawn = [one for one in every if one.differ][:MAPS_SHOWN]
    drawn = drawn or sorted(every, key=lambda one: not one.counts[NOT_COMPARED])[:1]
    parts = [_cut(one) for one in drawn]
    names = [_names(result, lines) for lines, _ in parts]
    label = 0.55 + LETTER * max((len(name) for some in names for name in some), default=0)
    width = max(6.5, label + 0.4 + CELL * max((len(rows) for _, rows in parts), default=0))
    title = textwrap.wrap(clean(wording.headline(result), 300), int(width * 11)) or [""]
    told = "; ".join([glance.captures(result), *(f"{name}: {value}" for name, value in glance.facts(result))])
    below = textwrap.wrap(told, int(width * 15))
    notes = [
        line for note in _notes(result, every, drawn, parts) for line in textwrap.wrap(note, int(width * 15))
    ]
    head = 0.2 + 0.2 * len(title)
    top, bottom = head + 0.15 + 0.15 * len(below), 0.75 + 0.15 * len(notes)
    heights = [0.75 + CELL * len(lines) for lines, _ in parts]
    height = top + sum(heights) + bottom
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.text(0.15 / width, 1 - 0.15 / height, "\n".join(title), va="top", size=10, weight="bold")
    figure.text(0.15 / width, 1 - head / height, "\n".join(below), va="top", size=7, color="#525d68")
    y = height - top
    for one, (lines, rows), some, space in zip(drawn, parts, names, heights, strict=True):
        y -= space
        box = (
            label / width,
            (y + 0.4) / height,
            CELL * len(rows) / width,
            CELL * len(lines) / height,
        )
        _map(figure.add_axes(box), one, lines, rows, some)
    _legend(figure, drawn, 0.15 * len(notes) / height, width, height)
    figure.text(0.15 / width, 0.08 / height, "\n".join(notes), va="bottom", size=7, color="#525d68")
    return figure


Lines = list[tuple[range, str]]


def _cut(one: Map) -> tuple[Lines, range]:
    """The lines and rows that are drawn: those around the first difference."""
    lines = one.lines
    loud = [number for number, (_, states) in enumerate(lines) if set(states) - QUIET]
    start = max(0, min((loud or [0])[0] - 1, len(lines) - LINES_SHOWN))
    columns = [row for row in range(len(one.rows)) if any(states[row] not in QUIET for _, states in lines)]
    left = max(0, min((columns or [0])[0] - 4, len(one.rows) - ROWS_SHOWN))
    return lines[start : start + LINES_SHOWN], range(left, min(len(one.rows), left + ROWS_SHOWN))


def _map(axes: Axes, one: Map, lines: Lines, rows: range, names: Sequence[str]) -> None:
    from matplotlib.colors import to_rgb

    numbers = np.array([[NUMBER[states[row]] for row in rows] for _, states in lines])
    colours = np.array([to_rgb(state.light[0]) for state in STATES])
    axes.imshow(colours[numbers], aspect="auto", interpolation="nearest")
    for number, state in enumerate(STATES):
        y, x = np.nonzero(numbers == number)
        if state.sign and len(x):
            axes.scatter(x, y, s=9, marker=_marker(state.sign), c=state.light[1], linewidths=0)
    axes.set_title(one.title, loc="left", size=8, weight="bold")
    axes.set_yticks(range(len(lines)), names, size=6.5, family="monospace")
    step = 1 if len(rows) <= 24 else 5 if len(rows) <= 60 else 10
    ticks = [number for number, row in enumerate(rows) if not row % step]
    axes.set_xticks(ticks, [str(one.rows[rows[number]].position) for number in ticks], size=6.5)
    axes.set_xlabel("position", size=7)
    axes.set_ylabel("site", size=7)
    axes.set_xticks(np.arange(-0.5, len(rows)), minor=True)
    axes.set_yticks(np.arange(-0.5, len(lines)), minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _marker(sign: str) -> Path:
    """A sign around the origin: thousands of them are drawn at once, unlike as many texts."""
    from matplotlib.path import Path
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    path = TextPath((0, 0), sign, size=10)
    box = path.get_extents()
    moved = Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2).transform_path(path)
    # What closes a shape has a place that means nothing, by which matplotlib would shrink a dot to nothing.
    codes = np.asarray(moved.codes)
    ends = (codes == Path.CLOSEPOLY)[:, None]
    return Path(np.where(ends, 0.0, moved.vertices), codes)


def _names(result: Result, lines: Lines) -> list[str]:
    assert result.cells is not None
    names = result.cells.sites
    return [
        _short(names[sites[0]])
        if len(sites) == 1
        else f"{len(sites)} sites to {_short(names[sites[-1]], 42)}"
        for sites, _ in lines
    ]


def _short(name: str, limit: int = 56) -> str:
    """The end of a name that is too long, since that tells sites apart."""
    shown = clean(name)
    return shown if len(shown) <= limit else f"…{shown[1 - limit :]}"


def _legend(figure: Figure, drawn: Sequence[Map], above: float, width: float, height: float) -> None:
    from matplotlib.patches import Patch

    there = maps.shown(drawn)
    handles = [
        Patch(
            facecolor=state.light[0],
            edgecolor="#9aa4ad",
            linewidth=0.5,
            label=f"{state.sign} {state.name}".strip(),
        )
        for state in STATES
        if state.code in there
    ]
    if handles:
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0.08 / width, above + 0.1 / height),
            ncols=min(len(handles), 6),
            frameon=False,
            fontsize=7,
        )


def _notes(
    result: Result, every: Sequence[Map], drawn: Sequence[Map], parts: Sequence[tuple[Lines, range]]
) -> Iterator[str]:
    """What the picture does not show."""
    yield from _shown(every, drawn, parts) if every else ["No row of any site was compared."]
    if left := maps.left_out(result):
        yield f"Not shown: {left}"
    if result.verdict != INCONCLUSIVE:  # which the headline explains
        yield from (f"{wording.reason(item)}." for item in result.reasons[:REASONS_SHOWN])
    yield "What this establishes, and what it does not, is in the report as text or as a page."


def _shown(every: Sequence[Map], drawn: Sequence[Map], parts: Sequence[tuple[Lines, range]]) -> Iterator[str]:
    """What the maps are, and what of them is not drawn."""
    yield "Sites in execution order from top to bottom; a column is one token position in one forward pass."
    more = len(every) - len(drawn)
    others = sum(bool(one.differ) for one in every) - sum(bool(one.differ) for one in drawn)
    holes = sum(bool(one.counts[NOT_COMPARED]) for one in every if one not in drawn)
    if more:
        told = f"Not shown: {count(more, 'further map')} of requests, {others:,} of them with differences"
        yield f"{told}, {holes:,} with cells that were not compared." if holes else f"{told}."
    for one, (lines, rows) in zip(drawn, parts, strict=True):
        cut = len(one.rows) - len(rows), len(one.lines) - len(lines)
        what = [count(number, noun) for number, noun in zip(cut, ("row", "line"), strict=True) if number]
        if what:
            yield f"Not shown of {clean(one.request)}: {' and '.join(what)}."
        yield from one.notes
