"""Captures and their diff as one archive, which is read back before it is handed over."""

from __future__ import annotations

import hashlib
import io
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from localizer.diff import diff
from localizer.diff.align import workloads_equal
from localizer.diff.result import Result
from localizer.diff.runs import RunFacts
from localizer.errors import LocalizerError
from localizer.report import json
from localizer.report.archive import readme
from localizer.store import keep, output, pack, reduce
from localizer.store.reader import Capture
from localizer.store.redact import Redactor, holds_tokens
from localizer.store.schema import DIGEST_BYTES
from localizer.store.verify import check_payload

RESULT, README, RUN = "result.json", "README.txt", "run.json"
DIGEST_SHARES = (0.96, 0.8, 0.6, 0.4, 0.2)
"""Parts of the limit that digests may take, which compress badly: the first with which all fits. Before that
what the diff reads of payload is set aside, up to half of the limit."""

SPARE = 4 << 10
"""Bytes of the limit that are left over for the headers of the payload."""

SHRINK = 0.9
"""Where the archive is still too large, so much of the payload is tried next."""

HOPELESS = 4
"""Payload of so many times the limit is not even tried whole."""


@dataclass(frozen=True)
class Packed:
    """An archive that was made.

    Attributes:
        path, size, sha256: of the file; bytes, and hex.
        left_out: what was taken away, by capture.
        result: the diff of the archive's captures, which is in it.
        changed: what the diff of the whole captures says otherwise.
    """

    path: Path
    size: int
    sha256: str
    left_out: dict[str, list[str]]
    result: Result
    changed: list[str]


@dataclass
class _Side:
    """A capture on its way into the archive."""

    name: str
    original: keep.ReadCapture
    wanted: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.bool_))
    digests: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))
    left_out: list[str] = field(default_factory=list)
    trimmed: bool = False


def attach(
    candidate: Capture,
    parent: Capture,
    controls: Sequence[Capture],
    path: Path,
    *,
    limit: int,
    redact: bool,
    run: RunFacts | None = None,
) -> Packed:
    """Compare captures and pack them.

    Args:
        candidate: the capture whose rows and order findings are told in.
        parent: the capture to which it is compared.
        controls: further captures of the parent.
        path: of the archive.
        limit: bytes that it may have.
        redact: take away what must not be told.
        run: what `localize run` said of its captures, as `localizer.run.attached` takes it from there.

    Raises:
        DamagedCapture: a capture is not what its records say.
        LocalizerError: the captures cannot be compared, were redacted before, or do not fit.
        OSError: the archive cannot be written.
    """
    given = {"candidate": candidate, "parent": parent}
    given |= {f"control-{number}": capture for number, capture in enumerate(controls, 1)}
    sides = [_Side(name, keep.ReadCapture(it.folder, it.shown)) for name, it in given.items()]
    captures = [side.original for side in sides]
    for capture in captures:
        if redact and capture.open.reduced is not None and capture.open.reduced.key:
            raise LocalizerError(
                f"{capture.shown} is redacted already; attach the original, or give --no-redact."
            )
    result = diff(captures[0], captures[1], captures[2:])
    redactor = Redactor(captures, _witnesses(result, captures)) if redact else None
    told = {} if run is None else {RUN: _encoded(msgspec.to_builtins(run))}
    found: tuple[Result, bytes] | int = 0
    reserved = min(sum(keep.payload_bytes(it, it.were_read()) for it in captures), limit // 2)
    for share in DIGEST_SHARES:
        _choose(sides, result, redactor, int(share * (limit - reserved)) // DIGEST_BYTES)
        with tempfile.TemporaryDirectory(prefix="localizer-") as scratch:
            found = _fit(sides, redactor, limit, Path(scratch), told)
        if not isinstance(found, int):
            break
    else:
        raise LocalizerError(
            f"The archive would have {found:,} bytes even without payload, more than {limit:,}; "
            "raise --limit, or capture fewer requests, layers or tokens."
        )
    packed, blob = found
    changed = differences(result, packed)
    if changed and not any(side.trimmed for side in sides):
        raise LocalizerError(f"The archive would not say the same of {changed[0]}; please report this.")
    output.write(path, blob)
    return Packed(
        path=path,
        size=len(blob),
        sha256=hashlib.sha256(blob).hexdigest(),
        left_out={side.name: side.left_out for side in sides},
        result=packed,
        changed=changed,
    )


def _witnesses(result: Result, captures: Sequence[Capture]) -> list[set[str]]:
    """Requests of each capture whose generated tokens are told: those of the first differences."""
    candidate, others = set[str](), set[str]()
    if result.first is not None:
        candidate.add(result.first.request)
        others.add(result.first.parent_request)
    places = (result.tokens.first, result.rows.amplifier, result.rows.symptom)
    candidate |= {place.request for place in places if place is not None}
    return [candidate, others, *(set[str]() for _ in captures[2:])]


def _choose(sides: Sequence[_Side], result: Result, redactor: Redactor | None, most: int) -> None:
    """Decide which digests are kept, at most so many, and which payload may be."""
    captures = [side.original for side in sides]
    near = [(it.first.request, it.first.position) for it in result.requests]
    near += [(it.first.parent_request, it.first.position) for it in result.requests]
    if result.first is not None:
        near.insert(0, (result.first.request, result.first.position))
    if result.tokens.first is not None:
        near.append((result.tokens.first.request, result.tokens.first.position))
    kept = keep.choose_digests(
        captures,
        near,
        most,
        by_request=all(workloads_equal(captures[0], capture) for capture in captures[1:]),
    )
    for side, digests in zip(sides, kept, strict=True):
        capture = side.original
        side.digests, side.wanted = digests, reduce.stored(capture) & digests[:, None]
        if redactor is not None:
            mine = redactor.witnessed(capture)[capture.table.columns["request"]]
            side.wanted &= capture.were_read() | mine[:, None]
            for column, site in enumerate(capture.sites):
                if holds_tokens(site.name):
                    side.wanted[:, column] &= redactor.told(site.name, capture.table.prefix)


def _fit(
    sides: Sequence[_Side], redactor: Redactor | None, limit: int, scratch: Path, told: Mapping[str, bytes]
) -> tuple[Result, bytes] | int:
    """The archive with as much payload as fits and the diff of what is in it; or its size without payload."""
    captures, wanted = [side.original for side in sides], [side.wanted for side in sides]
    if sum(map(keep.payload_bytes, captures, wanted)) <= HOPELESS * limit:
        result, blob = _written(sides, wanted, redactor, scratch / "all", told)
        if len(blob) <= limit:
            return result, blob
    order = [keep.importance(capture) for capture in captures]
    nothing = [np.zeros_like(cells) for cells in wanted]
    bare = _written(sides, nothing, redactor, scratch / "bare", told)
    budget = max(0, limit - len(bare[1]) - SPARE)
    while budget:
        chosen = keep.choose_payload(captures, wanted, order, budget)
        result, blob = _written(sides, chosen, redactor, scratch / "some", told)
        if len(blob) <= limit:
            return result, blob
        budget = int(budget * SHRINK) if budget > SPARE else 0
    return bare if len(bare[1]) <= limit else len(bare[1])


def _written(
    sides: Sequence[_Side],
    chosen: Sequence[np.ndarray],
    redactor: Redactor | None,
    folder: Path,
    told: Mapping[str, bytes],
) -> tuple[Result, bytes]:
    """The diff of the captures with the chosen payload, and the archive of them.

    Raises:
        DamagedCapture: a stored row of an original does not have its digest.
    """
    cuts = [reduce.Cut(side.digests, cells) for side, cells in zip(sides, chosen, strict=True)]
    kept = set[bytes]()
    if redactor is not None:
        for side, cut in zip(sides, cuts, strict=True):
            kept |= reduce.kept_digests(side.original, cut)
    for side, cut in zip(sides, cuts, strict=True):
        side.left_out = reduce.reduce(side.original, folder / side.name, cut, redactor, kept)
        side.trimmed = bool((~side.digests).any() or (cut.payload != side.wanted).any())
        check_payload(Capture(folder / side.name))
    captures = [Capture(folder / side.name, side.name) for side in sides]
    result = diff(captures[0], captures[1], captures[2:])
    members: dict[str, bytes | Path] = {
        README: readme({side.name: side.left_out for side in sides}, result, bool(told)).encode(),
        RESULT: _encoded(json.tree(result)),
        **told,
    }
    for side in sides:
        files = [file for file in sorted((folder / side.name).rglob("*")) if file.is_file()]
        members |= {str(file.relative_to(folder)): file for file in files}
    pack.write(folder / "archive.zip", members)
    blob = (folder / "archive.zip").read_bytes()
    shutil.rmtree(folder)
    return result, blob


def _encoded(plain: dict[str, Any]) -> bytes:
    text = io.StringIO()
    json.write(plain, text)
    return text.getvalue().encode()


def differences(one: Result, other: Result) -> list[str]:
    """What two results say otherwise, by the names of their fields, but for paths and settings.

    At sites whose rows are token ids only places and numbers of rows count: stored rows of them may have
    been taken away.
    """
    trees = [_essence(result) for result in (one, other)]
    return [name for name in trees[0] if trees[0][name] != trees[1][name]]


def _essence(result: Result) -> dict[str, Any]:
    names = ("verdict", "attribution", "tokens", "speculation", "first", "requests", "rows", "sites")
    tree = {name: msgspec.to_builtins(getattr(result, name)) for name in (*names, "histogram", "coverage")}
    tree["coverage"].pop("payload")
    for site in tree["sites"]:
        if holds_tokens(site["site"]):
            tree["sites"][tree["sites"].index(site)] = {
                name: site[name] for name in ("site", "rows_compared", "rows_differ", "missing")
            }
    for place in [tree, *tree["requests"]]:
        found = place["first"]
        if found is not None:  # where in a source that is may be told by a path
            found["segment"] = {name: found["segment"][name] for name in ("after", "before")}
        if found is not None and holds_tokens(found["site"]):
            place["first"] = {
                name: found[name] for name in ("request", "position", "step", "site", "segment")
            }
    return tree
