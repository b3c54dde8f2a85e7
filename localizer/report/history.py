"""One comment for all verdicts on a pull request: the newest in full, those before it folded below.

A comment carries its verdicts a second time, as data that readers do not see, so that the next one can tell
them again. Whoever may edit the comment may edit these data too: they are read as a stranger's.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from localizer.diff.record import Record
from localizer.report.gfm import code, prose
from localizer.report.scope import Scope

LIMIT = 65_536
"""Characters of a comment on GitHub; bytes here, which are never fewer."""

MARKER = "<!-- localizer:comment -->"
"""The first line of a comment that `localize attach --post` edits."""

RECORDS = re.compile(r"<!-- localizer:records ([A-Za-z0-9+/=]*) -->\s*\Z")

SENTENCES, WIDEST = 40, 300
"""Most sentences of a scope, and characters of one, that are kept of an earlier verdict."""

MOST = 1 << 20
"""Bytes that the hidden data may unpack to."""

Text = Annotated[str, msgspec.Meta(max_length=WIDEST)]
Texts = Annotated[list[Text], msgspec.Meta(max_length=SENTENCES)]


class Told(Record, frozen=True, kw_only=True):
    """A verdict as it is told again later.

    Attributes:
        when: the captures were made, as the candidate says.
        headline: the verdict in a line.
        establishes, does_not_establish: its own scope.
        attachment, sha256: the archive.
    """

    when: Text
    headline: Text
    establishes: Texts
    does_not_establish: Texts
    attachment: Text
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Records(Record, frozen=True, kw_only=True):
    """What a comment holds of its verdicts: the newest first, and how many older ones had no room."""

    told: list[Told]
    dropped: Annotated[int, msgspec.Meta(ge=0, le=10**6)] = 0


def told(*, when: str, headline: str, scope: Scope, attachment: str, sha256: str) -> Told:
    """A verdict with its sentences cut to what is kept."""
    return Told(
        when=_cut(when),
        headline=_cut(headline),
        establishes=[_cut(text) for text in scope.establishes[:SENTENCES]],
        does_not_establish=[_cut(text) for text in scope.does_not_establish[:SENTENCES]],
        attachment=_cut(attachment),
        sha256=sha256,
    )


def _cut(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def body(make: Callable[[int], str], now: Told, before: str | None = None) -> str:
    """The whole comment, of at most `LIMIT` bytes.

    Args:
        make: gives the newest verdict as Markdown of at most so many bytes.
        now: the same to be told again.
        before: the comment that this one replaces; None for none.
    """
    found = Records(told=[]) if before is None else _records(before)
    earlier, gone = ([], 0) if found is None else (found.told, found.dropped)
    kept = [item for item in earlier if (item.sha256, item.headline) != (now.sha256, now.headline)]

    def whole(newest: str, number: int) -> str:
        return _assembled(newest, now, kept[:number], len(kept) - number + gone, found is None)

    newest = make(LIMIT - _size(whole("-", 0)) + 1)
    number = len(kept)
    while number and _size(whole(newest, number)) > LIMIT:
        number -= 1
    return whole(newest, number)


def _size(text: str) -> int:
    return len(text.encode())


def _assembled(newest: str, now: Told, earlier: Sequence[Told], dropped: int, lost: bool) -> str:
    parts = [MARKER, newest]
    if earlier or dropped or lost:
        parts.append(_folded(earlier, dropped, lost))
    parts.append(f"<!-- localizer:records {_packed([now, *earlier], dropped)} -->")
    return "\n\n".join(filter(None, parts)) + "\n"


def _folded(earlier: Sequence[Told], dropped: int, lost: bool) -> str:
    """Earlier verdicts, the newest first."""
    lines = ["<details>", f"<summary>Earlier verdicts: {len(earlier):,}</summary>", ""]
    for item in earlier:
        lines += [prose(item.headline), ""]
        lines += [
            f"Captured {code(item.when)}, archive {code(item.attachment)}, SHA-256 {code(item.sha256)}.",
            "",
        ]
        for title, sentences in (
            ("It established", item.establishes),
            ("It did not establish", item.does_not_establish),
        ):
            lines += [f"{title}:", "", *(f"- {prose(text)}" for text in sentences or ["nothing."]), ""]
    if dropped:
        lines += [f"Left out, since a comment has a limit: {dropped:,} older.", ""]
    if lost:
        lines += ["What was told before could not be read from the comment that this one replaces.", ""]
    return "\n".join([*lines, "</details>"])


def _packed(items: Sequence[Told], dropped: int) -> str:
    plain = msgspec.json.encode(Records(told=list(items), dropped=min(dropped, 10**6)))
    return base64.b64encode(zlib.compress(plain, 9)).decode()


def read(comment: str) -> list[Told] | None:
    """The verdicts that a comment tells, the newest first; None where they cannot be read."""
    found = _records(comment)
    return None if found is None else found.told


def _records(comment: str) -> Records | None:
    found = RECORDS.search(comment)
    if found is None:
        return None
    try:
        unpacker = zlib.decompressobj()
        blob = unpacker.decompress(base64.b64decode(found[1], validate=True), MOST)
        if not unpacker.eof:
            return None
        return msgspec.json.decode(blob, type=Records)
    except (binascii.Error, zlib.error, msgspec.DecodeError, ValueError, RecursionError):
        return None
