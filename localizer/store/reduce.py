"""A part of a capture as a capture in its own right: its records say what was taken away, and from what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from localizer.store import schema, tensors, trace
from localizer.store.digest import shard_algorithm
from localizer.store.journal import append_journal
from localizer.store.reader import Capture
from localizer.store.redact import LEFT_OUT, LOG_TEXT, Redactor
from localizer.store.schema import COLUMNS, JOURNAL, LOG, MANIFEST, OPEN, ROW_INDEX, Coverage, Shard
from localizer.store.sets import RowSet


@dataclass(frozen=True)
class Cut:
    """What of a capture is kept.

    Attributes:
        digests: bool [rows], the rows that keep their digests.
        payload: bool [rows, sites], where payload is kept; only where there is any.
    """

    digests: np.ndarray
    payload: np.ndarray

    def left_out(self, capture: Capture) -> list[str]:
        """What is taken away, a sentence each."""
        found = []
        rows, missing = len(self.digests), int((~self.digests).sum())
        if missing:
            found.append(f"digests of {missing:,} of {rows:,} rows: more than the archive may hold")
        stored, kept = sum(capture.payload.values()), int(self.payload.sum())
        if kept < stored:
            found.append(f"payload of {stored - kept:,} of {stored:,} stored rows")
        return found


def whole(capture: Capture) -> Cut:
    """The cut that leaves everything there."""
    return Cut(np.ones(len(capture.table), np.bool_), stored(capture))


def stored(capture: Capture) -> np.ndarray:
    """Bool [rows, sites]: where rows were kept beside their digests.

    Raises:
        DamagedCapture: the kept rows are not rows of the capture.
    """
    found = np.zeros((len(capture.table), len(capture.sites)), np.bool_)
    column = {site.name: number for number, site in enumerate(capture.sites)}
    for part in capture.sets:
        for name in part.kept():
            part.check_kept_rows(name)
            rows = part.kept_rows(name)
            found[part.start + rows[rows < capture.known(part)], column[name]] = True
    return found


def kept_digests(capture: Capture, cut: Cut) -> set[bytes]:
    """The digests of the rows whose payload is kept."""
    return {row.tobytes() for row in _blocks(capture, cut.payload)}


def _blocks(capture: Capture, cells: np.ndarray) -> np.ndarray:
    """uint8 [cells, 16]: the digests of some cells of the table."""
    found = [
        part.digest(0, part.count)[cells[part.start : part.start + part.count, part.columns]]
        for part in capture.sets
    ]
    return np.concatenate(found) if found else np.zeros((0, schema.DIGEST_BYTES), np.uint8)


def reduce(
    capture: Capture,
    folder: Path,
    cut: Cut,
    redactor: Redactor | None = None,
    kept: Collection[bytes] = (),
) -> list[str]:
    """Write what is left of a capture into `folder`, which is made; return what was taken away.

    A capture of which nothing is taken away is copied as it is.

    Args:
        capture: the original, which has been checked.
        folder: where the new one goes.
        cut: what of rows and payload is kept.
        redactor: takes away what must not be told.
        kept: the digests of all payload that is kept, of this capture and of those redacted with it.

    Raises:
        DamagedCapture, LocalizerError, OSError: the original cannot be read, or the new one not written.
    """
    left_out = cut.left_out(capture) + (list(LEFT_OUT) if redactor is not None else [])
    folder.mkdir(parents=True)
    if not left_out:
        for name in (OPEN, JOURNAL, LOG, MANIFEST, *(file.name for file in capture.files)):
            _copy(capture.folder / name, folder / name)
        return []
    (folder / JOURNAL).touch()
    log = LOG_TEXT.encode() if redactor is not None else _bytes(capture.folder / LOG)
    tensors.replace(folder / LOG, log)
    opening = capture.open if redactor is None else redactor.opening(capture.open)
    manifest = _bytes(capture.folder / MANIFEST)
    mark = schema.Reduced(
        of=capture.label,
        manifest=hashlib.sha256(manifest).hexdigest() if manifest else "",
        left_out=left_out,
        key="" if redactor is None else redactor.key,
    )
    tensors.replace(folder / OPEN, schema.encode(msgspec.structs.replace(opening, reduced=mark)))
    _shards(capture, folder, cut, redactor, kept)
    if capture.manifest is not None:
        _manifest(capture, capture.manifest, folder, cut, redactor)
    return left_out


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() and not path.is_symlink() else b""


def _copy(path: Path, to: Path) -> None:
    if path.is_file() and not path.is_symlink() and not to.exists():
        to.parent.mkdir(exist_ok=True)
        to.write_bytes(path.read_bytes())


def _shards(
    capture: Capture, folder: Path, cut: Cut, redactor: Redactor | None, kept: Collection[bytes]
) -> None:
    """Write the shards, in the order of the journal."""
    by_path: dict[Path, tuple[str, RowSet]] = {}
    for part in capture.sets:
        by_path |= {part.rows: ("rows", part), part.digests: ("digests", part)}
        if part.payload is not None:
            by_path[part.payload] = ("payload", part)
    for file in capture.files:
        path, to = capture.folder / file.name, folder / file.name
        if file.name in (OPEN, JOURNAL, LOG):
            continue
        to.parent.mkdir(exist_ok=True)
        if path in by_path:
            what, part = by_path[path]
            arrays, facts = _arrays(capture, what, part, cut, redactor, kept)
            if not arrays:
                continue
            size, digest = tensors.write(to, arrays, facts)
        else:
            blob = path.read_bytes()  # rows of a killed run that lack their digests are no rows of it
            if trace.NAME.fullmatch(file.name):
                blob = blob if redactor is None else _traced(capture, path, redactor)
            elif redactor is not None:
                continue
            tensors.replace(to, blob)
            size, digest = len(blob), xxhash.xxh3_128_hexdigest(blob)
        append_journal(folder, Shard(name=file.name, size=size, xxh3_128=digest))


def _traced(capture: Capture, path: Path, redactor: Redactor) -> bytes:
    steps = redactor.steps(trace.read(path, len(capture.requests)))
    return b"".join(msgspec.json.encode(step) + b"\n" for step in steps)


def _arrays(
    capture: Capture,
    what: str,
    part: RowSet,
    cut: Cut,
    redactor: Redactor | None,
    kept: Collection[bytes],
) -> tuple[Mapping[str, np.ndarray], str]:
    """The tensors and the metadata of a new shard; none if no row of the set is one of the table."""
    known = capture.known(part)
    if known == 0 < part.count:
        return {}, ""
    rows = slice(part.start, part.start + known)
    prefix = capture.table.prefix[rows]
    if what == "rows":
        columns = {name: capture.table.columns[name][rows] for name in COLUMNS}
        if redactor is not None:
            columns, prefix = redactor.columns(capture, columns, prefix), redactor.prefixes(prefix)
        return columns | {"prefix": prefix}, part.open(part.rows).metadata
    if what == "digests":
        present = part.present(0, known) & cut.digests[rows, None]
        digest = np.where(present[:, :, None], part.digest(0, known), 0).astype(np.uint8)
        if redactor is not None:
            names = [site.name for site in part.ordered]
            digest = redactor.digests(names, digest, present, prefix, kept)
        packed = np.packbits(present, axis=1, bitorder="little")
        return {"digest": digest, "present": packed}, _facts(part)
    found: dict[str, np.ndarray] = {}
    assert part.payload is not None
    for column, site in enumerate(capture.sites):
        if part.keeps(site.name):
            indices = part.kept_rows(site.name)
            mine = np.zeros(len(indices), np.bool_)
            within = indices < known
            mine[within] = cut.payload[rows][indices[within], column]
            if mine.any():
                found[site.name] = part.open(part.payload).array(site.name)[mine]
                found[site.name + ROW_INDEX] = indices[mine]
    return found, part.open(part.payload).metadata


def _facts(part: RowSet) -> str:
    """The metadata of a digest shard whose sites are in the order of the capture."""
    ordered = [msgspec.to_builtins(site) for site in part.ordered]
    algorithm = shard_algorithm([site.digest for site in part.sites])
    return json.dumps({"algorithm": algorithm, "sites": ordered})


def _manifest(
    capture: Capture, manifest: schema.Manifest, folder: Path, cut: Cut, redactor: Redactor | None
) -> None:
    """Write the manifest; where digests were taken away the capture is incomplete, and says why."""
    if redactor is not None:
        manifest = redactor.manifest(capture, manifest)
    missing = int((~cut.digests).sum())
    if missing:
        held = np.zeros(len(capture.sites), np.int64)
        for part in capture.sets:
            known = capture.known(part)
            kept = part.present(0, known) & cut.digests[part.start : part.start + known, None]
            held[part.columns] += kept.sum(axis=0)
        coverage = {
            site.name: Coverage(expected=manifest.coverage[site.name].expected, recorded=int(count))
            for site, count in zip(capture.sites, held, strict=True)
        }
        manifest = msgspec.structs.replace(
            manifest,
            state="incomplete",
            reasons=[
                *manifest.reasons,
                f"digests of {missing} of {len(cut.digests)} rows were left out of this archive",
            ],
            coverage=coverage,
        )
    shards: Sequence[Shard] = Capture(folder).files  # without its manifest: what the journal lists
    documents = [_describe(folder, name) for name in (OPEN, JOURNAL, LOG)]
    manifest = msgspec.structs.replace(manifest, files=[*documents, *shards])
    tensors.replace(folder / MANIFEST, schema.encode(manifest))


def _describe(folder: Path, name: str) -> Shard:
    path = folder / name
    return Shard(name=name, size=path.stat().st_size, xxh3_128=tensors.file_digest(path))
