"""A result as one HTML page that needs no network: what the text report says, and a map to look around in."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import groupby
from typing import Any, TextIO

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from localizer.diff.cells import DIFFERENT, Cell
from localizer.diff.result import CANDIDATE, PARENT, Result
from localizer.report import glance, maps, returned, text, within, wording
from localizer.report.blocks import Block, Line
from localizer.report.maps import Map
from localizer.report.safe import clean
from localizer.report.scope import scope
from localizer.report.states import NUMBER, STATES
from localizer.report.tolerance import WITHIN

SETTINGS_SHOWN = 200
"""Differing settings that are listed, and characters of a value of theirs."""
WIDEST_VALUE = 400

STATIC_RUNS = 20_000
"""Fields of the maps that are drawn for readers without JavaScript."""


@dataclass
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: list[Block] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Its anchor, unlike any that the page has by itself."""
        return f"on-{re.sub(r'[^a-z]+', '-', self.title.lower()).strip('-')}"


def render(result: Result, stream: TextIO) -> None:
    """Write the page."""
    files = resources.files("localizer.report") / "page"
    style, script = (
        palette() + (files / "page.css").read_text("utf-8"),
        (files / "page.js").read_text("utf-8"),
    )
    # Both come from this package and from nowhere else; whatever a capture says goes in escaped.
    drawn = maps.maps(result)
    page = template().render(
        **content(result, drawn),
        style=Markup(style),
        script=Markup(script),
        policy=policy(style, script),
        data=Markup(embedded(data(result, drawn))),
    )
    stream.write(page)


@cache
def template() -> Template:
    """The page without its content; everything that goes in is escaped unless it says otherwise."""
    environment = Environment(
        loader=PackageLoader("localizer.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda block: type(block).__name__
    return environment.get_template("page.html")


def policy(style: str, script: str) -> str:
    """A content security policy under which nothing runs but that script, and nothing is loaded at all."""
    hashes = {name: _hash(code) for name, code in (("style", style), ("script", script))}
    return (
        f"default-src 'none'; style-src '{hashes['style']}'; script-src '{hashes['script']}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(code: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}"


def palette() -> str:
    """The colours of all states as CSS."""
    light = "".join(_rule(number, state.light) for number, state in enumerate(STATES))
    dark = "".join(_rule(number, state.dark) for number, state in enumerate(STATES))
    return f"{light}@media screen and (prefers-color-scheme: dark) {{\n{dark}}}\n"


def _rule(number: int, colours: tuple[str, str]) -> str:
    return f".s{number} {{ background-color: {colours[0]}; color: {colours[1]}; }}\n"


def embedded(plain: Any) -> str:
    """JSON that may stand in a script element: ASCII, and without a character that could end it."""
    blob = json.dumps(plain, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return blob.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def content(result: Result, drawn: Sequence[Map]) -> dict[str, Any]:
    """What the template shows."""
    lead, before, after = arranged(result)
    there = maps.shown(drawn)
    static: list[dict[str, Any]] = []
    runs = 0
    for one in drawn:
        fields = [(sites, list(_fields(states))) for sites, states in one.lines]
        runs += sum(len(found) for _, found in fields)
        if runs > STATIC_RUNS and static:
            break
        static.append({"map": one, "lines": [_static_line(result, *item) for item in fields]})
    limits = scope(result)
    return {
        "result": result,
        "verdict": result.verdict,
        "headline": wording.headline(result).partition(": ")[2],
        "captures": glance.captures(result),
        "facts": list(glance.facts(result)),
        "lead": lead,
        "before": before,
        "after": after,
        "establishes": limits.establishes or ["nothing."],
        "open": limits.does_not_establish,
        "states": STATES,
        "legend": [number for number, state in enumerate(STATES) if state.code in there],
        "maps": drawn,
        "static": static,
        "left_out": maps.left_out(result),
        "unread": DIFFERENT in there,
        "tokens": [returned.table(item) for item in (result.returned.requests if result.returned else [])],
        "tokens_left_out": result.returned.requests_left_out if result.returned else 0,
        "sides": _sides(result),
    }


def _sides(result: Result) -> tuple[str, str]:
    return within.SIDES if within.is_within(result) else (CANDIDATE, PARENT)


def arranged(result: Result) -> tuple[list[Block], list[Section], list[Section]]:
    """What stands beside the verdict, the sections before the map, and those behind it."""
    if within.is_within(result):
        lead, behind = sections(within.document(result))
        return lead[1:], [], behind
    lead = list(text.answer(result))
    first, parity = sections(text.differing(result.differences, SETTINGS_SHOWN, WIDEST_VALUE))
    _, (evidence, *others) = sections(text.body(result))
    return [*lead, *first], [*parity, evidence], others


def sections(blocks: Iterable[Block]) -> tuple[list[Block], list[Section]]:
    """Blocks before the first heading, and a section for each heading."""
    lead: list[Block] = []
    found: list[Section] = []
    for block in blocks:
        if isinstance(block, Line) and block.role == "heading":
            found.append(Section(block.text))
        else:
            (found[-1].blocks if found else lead).append(block)
    return lead, found


# -- the map ----------------------------------------------------------------------------------------------


def _fields(states: str) -> Iterator[tuple[int, int]]:
    """Runs of a line: the state's index, and over how many rows it goes."""
    for code, run in groupby(states):
        yield NUMBER[code], len(list(run))


_LETTERS = {ord(code): ord("a") + number for code, number in NUMBER.items()}


def _static_line(result: Result, sites: Sequence[int], fields: list[tuple[int, int]]) -> dict[str, Any]:
    assert result.cells is not None
    names = [clean(result.cells.sites[site]) for site in (sites[0], sites[-1])]
    title = names[0] if len(sites) == 1 else f"{names[0]} … {names[1]} ({len(sites)} sites)"
    return {"title": title, "fields": fields}


def data(result: Result, drawn: Sequence[Map]) -> dict[str, Any]:
    """What the script draws from: all text in it is clean, rows share their states."""
    if result.cells is None:
        return {"states": [], "sites": [], "maps": []}
    sites = result.cells.sites
    groups = [maps.group(name) for name in sites]
    return {
        "states": [[state.name, state.sign] for state in STATES],
        "different": NUMBER[DIFFERENT],
        "sides": _sides(result),
        "sites": [
            [clean(name), maps.label(name), int(number > 0 and groups[number] != groups[number - 1])]
            for number, name in enumerate(sites)
        ],
        "maps": [_map(one) for one in drawn],
    }


def _map(one: Map) -> dict[str, Any]:
    patterns: dict[str, int] = {}
    rows = []
    for row, codes in zip(one.rows, one.states, strict=True):
        states = codes.translate(_LETTERS)
        parent = None if row.parent_request is None else [clean(row.parent_request), row.parent_step]
        rows.append([row.position, row.step, row.kind, parent, patterns.setdefault(states, len(patterns))])
    return {
        "request": clean(one.request),
        "sites": list(one.sites),
        "lines": [len(sites) for sites, _ in one.lines],
        "rows": rows,
        "patterns": list(patterns),
        "cells": [[row, site, *_cell(cell)] for (row, site), cell in one.cells.items()],
        "notes": list(one.notes),
    }


def _cell(cell: Cell) -> list[Any]:
    """Its sizes as they are shown, with their names, and the first differing element; [] where unknown."""
    both = cell.values
    if both is None or cell.elements_differ is None or cell.elements is None:
        return []
    sizes = [
        ("elements that differ", f"{cell.elements_differ:,} of {cell.elements:,}"),
        ("max ULP", None if cell.max_ulp is None else f"{cell.max_ulp:,}"),
        ("max abs", None if cell.max_abs is None else f"{cell.max_abs:.6g}"),
        ("max rel", None if cell.max_rel is None else f"{cell.max_rel:.6g}"),
        ("cosine", None if cell.cosine is None else f"{cell.cosine:.9g}"),
        ("tolerance", None if cell.within_tolerance is None else WITHIN[cell.within_tolerance]),
    ]
    element = f"[{', '.join(map(str, cell.first_element))}]" if cell.first_element else ""
    values = [[value.decimal, value.hex] for value in (both.candidate, both.parent)]
    return [{name: shown for name, shown in sizes if shown is not None}, element, *values]
