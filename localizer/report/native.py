"""What is said of native code that a source changes and that was not rebuilt."""

from __future__ import annotations

from localizer.diff.result import Result
from localizer.report.counts import count
from localizer.report.safe import clean
from localizer.store.schema import Native

NAMED = 3
"""Files that are named before their number is."""


def native_code(native: Native) -> str:
    """In a sentence, without a full stop, which files have no effect."""
    return f"native code is not rebuilt: {_which(native)}"


def does_not_establish(result: Result) -> list[str]:
    """That changes of native code are no part of a comparison, for each side that has such."""
    sides = {"candidate": result.captures.candidate.native, "parent": result.captures.parent.native}
    return [
        f"What the {side}'s changes of native code do: it was not rebuilt; {_which(native)}."
        for side, native in sides.items()
        if native is not None
    ]


def _which(native: Native) -> str:
    base = clean(native.base)
    if native.against == "unknown":
        return f"which of it differs is not known, for want of {base or 'an answer of git'} in the repository"
    files = named(native)
    if native.against == "installed":
        return f"{files} {_differ(native)} from {base} and {_have(native)} no effect"
    if native.against == "folder":
        return f"{files} {_have(native)} no effect"
    changes = f"uncommitted changes of {files} have no effect; " if native.count else ""
    return f"{changes}committed changes are not known, for want of {base} in the checkout"


def named(native: Native) -> str:
    """`csrc/a.cu, csrc/b.cu, csrc/c.cu and 4 more files`."""
    files = native.files[:NAMED]
    more = native.count - len(files)
    return ", ".join(map(clean, files)) + (f" and {count(more, 'more file')}" if more > 0 else "")


def _differ(native: Native) -> str:
    return "differs" if native.count == 1 else "differ"


def _have(native: Native) -> str:
    return "has" if native.count == 1 else "have"
