"""How a map shows what is known of a row at a site: a word, a sign and colours, never a colour alone."""

from __future__ import annotations

from dataclasses import dataclass

from localizer.diff.cells import CLASS_STATES, DIFFERENT, EQUAL, NOT_APPLICABLE, NOT_COMPARED


@dataclass(frozen=True)
class State:
    """One kind of cell.

    Attributes:
        code: its character in a result.
        name: the class of a difference, or what else is known.
        sign: what stands in the cell.
        light, dark: background and ink of both themes; severity grows with the contrast to the page, so that
            the order is seen without telling colours apart.
    """

    code: str
    name: str
    sign: str
    light: tuple[str, str]
    dark: tuple[str, str]


_CLASSES = {
    "signed-zero": ("±", ("#fff1c4", "#3a2f00"), ("#443c1f", "#fff1c4")),
    "nan-payload": ("N", ("#ffe28f", "#3a2f00"), ("#5e5019", "#fff1c4")),
    "1-ulp": ("1", ("#fdc367", "#3a2300"), ("#7d5810", "#ffffff")),
    "k-ulp": ("k", ("#f08a3c", "#2b1200"), ("#a85c14", "#ffffff")),
    "value": ("v", ("#bf3f0c", "#ffffff"), ("#ff8a5c", "#2a0c00")),
    "non-finite": ("∞", ("#6d1a57", "#ffffff"), ("#f3a0d8", "#2a0a20")),
    "shape": ("S", ("#1d4f91", "#ffffff"), ("#8dbcf5", "#06182e")),
    "dtype": ("T", ("#1d4f91", "#ffffff"), ("#8dbcf5", "#06182e")),
}

STATES = (
    State(EQUAL, "equal", "", ("#dfe9f0", "#33424f"), ("#24323e", "#b4c4d2")),
    *(State(code, name, *_CLASSES[name]) for name, code in CLASS_STATES.items()),
    State(DIFFERENT, "different bytes", "≠", ("#74508f", "#ffffff"), ("#cda6e6", "#1d0b29")),
    State(NOT_COMPARED, "not compared", "·", ("#ececec", "#555555"), ("#1d1d1d", "#a6a6a6")),
    State(NOT_APPLICABLE, "not applicable", "", ("#ffffff", "#555555"), ("#14181c", "#a0a0a0")),
)
"""All of them, in the order of a legend: the mildest first."""

NUMBER = {state.code: number for number, state in enumerate(STATES)}
"""Their places in it, by code."""
