"""Reading a capture: nothing is trusted before it is checked, nothing large is read before it is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from localizer.errors import DamagedCapture, NotACapture
from localizer.store import schema, tensors, trace
from localizer.store.expected import applicable
from localizer.store.schema import DIGEST, DIGEST_BYTES, UNFINISHED, Manifest, Open, Shard, Site
from localizer.store.steps import COLUMNS
from localizer.store.trace import StepTrace
from localizer.store.writer import ROW_INDEX
from localizer.wire.spec import TOKEN_ROWS

SHARD_NAME = re.compile(
    r"rank-(0|[1-9]\d{0,4})/(rows|digests|payload)-(\d{5}|[1-9]\d{5,8})\.safetensors", re.ASCII
)


class _Facts(msgspec.Struct, frozen=True):
    """Metadata of a digest shard."""

    algorithm: str
    sites: list[Site]


@dataclass(frozen=True)
class Table:
    """All rows of a capture, in the order they were computed.

    Attributes:
        columns: the integer columns of `localizer.store.steps.COLUMNS`, each [rows].
        prefix: uint8 [rows, 16].
        digest: uint8 [rows, sites, 16]; zero where `present` is False.
        present: bool [rows, sites].
    """

    columns: Mapping[str, np.ndarray]
    prefix: np.ndarray
    digest: np.ndarray
    present: np.ndarray

    def __len__(self) -> int:
        return len(self.prefix)


@dataclass(frozen=True)
class Payload:
    """Where the payload of one site lies: the tensor, and for each stored row its row in the table."""

    file: tensors.TensorFile
    name: str
    rows: np.ndarray


class Capture:
    """A capture on disk, complete or not.

    Args:
        folder: the numbered folder, e.g. `captures/candidate/0001`.

    Raises:
        NotACapture: there is no open.json.
        DamagedCapture: a document is malformed, or two of them contradict each other.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / schema.OPEN).is_file():
            raise NotACapture(
                f"{folder} is not a capture: it holds no {schema.OPEN}; name a capture or its folder."
            )
        self.open = schema.decode(folder / schema.OPEN, Open)
        path = folder / schema.MANIFEST
        self.manifest = schema.decode(path, Manifest) if os.path.lexists(path) else None
        if self.manifest is not None:
            self._check_manifest(self.manifest)
        self.files = self._files()

    @property
    def label(self) -> str:
        """NAME/NNNN as the person types it."""
        return f"{self.open.name}/{self.open.number:04d}"

    @property
    def complete(self) -> bool:
        return self.manifest is not None and self.manifest.state == "complete"

    @property
    def reasons(self) -> list[str]:
        """Why the capture is incomplete; empty when it is complete."""
        if self.manifest is None:
            return ["it has no manifest: the run was killed, interrupted or failed"]
        return list(self.manifest.reasons)

    @cached_property
    def requests(self) -> list[str]:
        """Request ids in the order of the workload."""
        work = self.open.workload
        return [name for names in schema.rounds(work.matrix, work.repeats) for name in names]

    @cached_property
    def prompts(self) -> dict[str, list[int]]:
        """Prompt token ids by request."""
        prompts = self.open.workload.prompts
        return {name: prompts[int(name.rpartition(".")[2])] for name in self.requests}

    @cached_property
    def outputs(self) -> dict[str, list[int]]:
        """Generated tokens by request: those returned.

        Without a manifest, and where a request was not finished and nothing of it was returned, those that
        its rows decided.
        """
        if self.manifest is None:
            return self._decided()
        outputs = self.manifest.outputs
        lost = {output.request for output in outputs if output.finish in UNFINISHED and not output.tokens}
        decided = self._decided() if lost else {}
        return {
            output.request: decided.get(output.request, []) if output.request in lost else output.tokens
            for output in outputs
        }

    def _decided(self) -> dict[str, list[int]]:
        """The tokens that rows decided, by request."""
        tokens: dict[str, list[int]] = {}
        columns = self.table.columns
        decided = applicable(columns, TOKEN_ROWS)
        for request, token in zip(columns["request"][decided], columns["sampled"][decided], strict=True):
            tokens.setdefault(self.requests[request], []).append(int(token))
        return tokens

    def _check_manifest(self, manifest: Manifest) -> None:
        """Check that the parts of the manifest fit each other and the workload."""
        returned = [output.request for output in manifest.outputs]
        sites = {site.name for site in manifest.sites}
        for wrong, found in (
            ("it lists a request twice", len(set(returned)) != len(returned)),
            ("it lists a request that the workload does not have", not set(returned) <= set(self.requests)),
            ("it is complete without all requests", self.complete and len(returned) != len(self.requests)),
            ("it lists a site twice", len(sites) != len(manifest.sites)),
            ("its coverage is of other sites", sites != set(manifest.coverage)),
        ):
            if found:
                raise DamagedCapture(
                    f"{self.folder / schema.MANIFEST} is damaged: {wrong}; fetch the capture again."
                )

    # -- files -----------------------------------------------------------------------------------------

    def _files(self) -> list[Shard]:
        """Listed files: those of the journal, checked against the manifest where there is one."""
        journal = self._journal()
        if self.manifest is None:
            return journal
        documents = {schema.OPEN, schema.JOURNAL, schema.LOG}
        listed = {file.name: file for file in self.manifest.files}
        if len(listed) != len(self.manifest.files) or not documents <= set(listed):
            raise DamagedCapture(
                f"{self.folder / schema.MANIFEST} does not list each file once; fetch the capture again."
            )
        odd = {file.name for file in set(listed.values()) ^ set(journal)} - documents
        if odd:
            raise DamagedCapture(
                f"{self.folder}: journal and manifest disagree on {min(odd)[:80]!r}; fetch the capture again."
            )
        return list(self.manifest.files)

    def _journal(self) -> list[Shard]:
        path = self.folder / schema.JOURNAL
        if not os.path.lexists(path):
            return []
        lines = schema.read(path).split(b"\n")
        shards = []
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                shard = schema.parse(line, Shard)
            except ValueError:
                if number == len(lines) and self.manifest is None:
                    break  # a torn last line is what a killed run leaves
                raise DamagedCapture(
                    f"{path} is damaged in line {number}; fetch the capture again."
                ) from None
            if not SHARD_NAME.fullmatch(shard.name) and not trace.NAME.fullmatch(shard.name):
                raise DamagedCapture(f"{path} lists the foreign file {shard.name[:80]!r} in line {number}.")
            shards.append(shard)
        if len({shard.name for shard in shards}) != len(shards):
            raise DamagedCapture(f"{path} lists a file twice; fetch the capture again.")
        return shards

    def _path(self, file: Shard) -> Path:
        """Where a listed file lies: a plain file of the recorded size, reached through no link."""
        path = self.folder / file.name
        if not path.is_file() or path.resolve() != self.folder.resolve() / file.name:
            raise DamagedCapture(f"{path} is missing or not a plain file; fetch the capture again.")
        size = path.stat().st_size
        if size != file.size:
            raise DamagedCapture(f"{path} has {size} bytes instead of {file.size}; fetch the capture again.")
        return path

    def check_file(self, file: Shard) -> None:
        """Compare a listed file with its record.

        Raises:
            DamagedCapture: it is missing, a link, of another size, or of another digest.
        """
        path = self._path(file)
        if tensors.file_digest(path) != file.xxh3_128:
            raise DamagedCapture(
                f"{path} does not have the digest that was recorded; fetch the capture again."
            )

    def check(self) -> None:
        """Check every listed file, then that tables and payload fit together.

        Raises:
            DamagedCapture: something does not; the message names the first such file.
        """
        for file in self.files:
            self.check_file(file)
        _ = self.table, self.payload

    def _shards(self, what: str) -> dict[tuple[int, int], tensors.TensorFile]:
        found = {}
        for file in self.files:
            match = SHARD_NAME.fullmatch(file.name)
            if match and match[2] == what:
                found[int(match[1]), int(match[3])] = tensors.TensorFile(self._path(file))
        return dict(sorted(found.items()))

    # -- tables ----------------------------------------------------------------------------------------

    @cached_property
    def _digest_shards(self) -> dict[tuple[int, int], tuple[tensors.TensorFile, list[Site]]]:
        shards = {}
        for key, file in self._shards("digests").items():
            try:
                facts = schema.parse(file.metadata.encode("utf-8", "surrogatepass"), _Facts)
            except ValueError as error:
                raise DamagedCapture(
                    f"{file.path} is damaged: its metadata is malformed ({error})."
                ) from None
            if facts.algorithm != DIGEST:
                raise DamagedCapture(
                    f"{file.path} holds {facts.algorithm[:40]!r} digests; this localizer reads only {DIGEST}."
                )
            if len({site.name for site in facts.sites}) != len(facts.sites):
                raise DamagedCapture(f"{file.path} is damaged: it names a site twice.")
            shards[key] = (file, facts.sites)
        return shards

    @cached_property
    def sites(self) -> list[Site]:
        """Sites in execution order."""
        if self.manifest is not None:
            return list(self.manifest.sites)
        last = list(self._digest_shards.values())[-1:]
        return list(last[0][1]) if last else []

    @cached_property
    def table(self) -> Table:
        """The row table with its digests, joined over all shards."""
        rows, digests = self._shards("rows"), self._digest_shards
        both = [key for key in rows if key in digests]  # a killed run may leave rows without digests
        if self.manifest is not None and set(rows) != set(digests):
            raise DamagedCapture(f"{self.folder} lists row and digest shards that do not belong together.")
        index = {site.name: number for number, site in enumerate(self.sites)}
        sets = [(rows[key], *digests[key]) for key in both]
        total = sum(_fitting(*shards, index) for shards in sets)  # all of them, before room is made for them
        if len(sets) == 1:
            return self._part(*sets[0], index)
        whole = Table(
            {name: np.zeros(total, dtype) for name, dtype in COLUMNS.items()},
            np.zeros((total, DIGEST_BYTES), np.uint8),
            np.zeros((total, len(index), DIGEST_BYTES), np.uint8),
            np.zeros((total, len(index)), np.bool_),
        )
        end = 0
        for shards in sets:
            part = self._part(*shards, index)
            where, end = slice(end, end + len(part)), end + len(part)
            for name, column in part.columns.items():
                whole.columns[name][where] = column
            whole.prefix[where] = part.prefix
            whole.digest[where] = part.digest
            whole.present[where] = part.present
        return whole

    def _part(
        self, rows: tensors.TensorFile, digests: tensors.TensorFile, sites: list[Site], index: dict[str, int]
    ) -> Table:
        """The table of one set, of shards that fit together."""
        columns = {name: rows.array(name) for name in COLUMNS}
        limits = {
            "request": len(self.requests),
            "kind": len(schema.KINDS),
            "logits": schema.DECIDES_TOKEN + 1,
            "position": schema.MAX_POSITION + 1,
            "step": 1 << 31,
            "occurrence": 1 << 31,
        }
        for name, limit in limits.items():
            column = columns[name]
            if len(column) and not (0 <= column.min() and column.max() < limit):
                raise DamagedCapture(
                    f"{rows.path} is damaged: column {name!r} holds values that do not exist."
                )
        digest = digests.array("digest")
        bits = np.unpackbits(digests.array("present"), axis=1, count=len(sites), bitorder="little")
        present = bits.astype(np.bool_)
        if [site.name for site in sites] != list(index):
            target = [index[site.name] for site in sites]
            wide = np.zeros(digest.shape, np.uint8)
            seen = np.zeros(present.shape, np.bool_)
            wide[:, target], seen[:, target] = digest, present
            digest, present = wide, seen
        return Table(columns, rows.array("prefix"), digest, present)

    @cached_property
    def steps(self) -> list[StepTrace]:
        """The schedule trace: what each step was asked for; empty where a capture has none."""
        named = [(file, match) for file in self.files if (match := trace.NAME.fullmatch(file.name))]
        named.sort(key=lambda item: (int(item[1][1]), int(item[1][2])))
        found = [trace.read(self._path(file), len(self.requests)) for file, _ in named]
        return [step for steps in found for step in steps]

    @cached_property
    def payload(self) -> dict[str, list[Payload]]:
        """Stored rows by site: where they lie, and which rows of the table they are."""
        starts, total = {}, 0
        for key, file in self._shards("rows").items():
            if key in self._digest_shards:
                starts[key], total = (total, _rows(file)), total + _rows(file)
        found: dict[str, list[Payload]] = {}
        for key, file in self._shards("payload").items():
            if key not in starts:
                raise DamagedCapture(f"{file.path} holds payload without its row table.")
            start, count = starts[key]
            layouts = {site.name: (site.dtype, site.shape) for site in self._digest_shards[key][1]}
            for name in file.names():
                if name.endswith(ROW_INDEX):
                    continue
                indices = name + ROW_INDEX
                layout = file.dtype(name), file.shape(name)[1:]
                if layouts.get(name) != layout or indices not in file or not file.shape(name):
                    raise DamagedCapture(
                        f"{file.path} is damaged: {name[:80]!r} is not the payload of a site."
                    )
                _expect(file, indices, "int64", file.shape(name)[:1])
                rows = file.array(indices)
                if len(rows) and not (rows.min() >= 0 and rows.max() < count):
                    raise DamagedCapture(
                        f"{file.path} is damaged: {name[:80]!r} names rows that do not exist."
                    )
                found.setdefault(name, []).append(Payload(file, name, rows + start))
        return found

    def row_payload(self, site: str, row: int) -> np.ndarray | None:
        """The stored row of a site, in its own dtype and shape; None where only the digest was kept."""
        for part in self.payload.get(site, []):
            where = np.flatnonzero(part.rows == row)
            if len(where):
                return part.file.array(part.name)[where[0]]
        return None


def _rows(file: tensors.TensorFile) -> int:
    """The number of rows of a set."""
    if "position" not in file or len(file.shape("position")) != 1:
        raise DamagedCapture(f"{file.path} is damaged: it has no column 'position'.")
    return file.shape("position")[0]


def _fitting(
    rows: tensors.TensorFile, digests: tensors.TensorFile, sites: list[Site], index: dict[str, int]
) -> int:
    """The number of rows of a set whose shards fit together and have exactly the sites of the capture.

    Raises:
        DamagedCapture: they do not.
    """
    count = _rows(rows)
    for name, dtype in COLUMNS.items():
        _expect(rows, name, dtype.name, (count,))
    _expect(rows, "prefix", "uint8", (count, DIGEST_BYTES))
    _expect(digests, "digest", "uint8", (count, len(sites), DIGEST_BYTES))
    _expect(digests, "present", "uint8", (count, (len(sites) + 7) // 8))
    if len(sites) != len(index):
        raise DamagedCapture(f"{digests.path} does not name all {len(index)} sites of the capture.")
    unknown = [site.name for site in sites if site.name not in index]
    if unknown:
        raise DamagedCapture(
            f"{digests.path} holds the site {unknown[0][:80]!r}, which the manifest does not name."
        )
    return count


def _expect(file: tensors.TensorFile, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    if name not in file or file.dtype(name) != dtype or file.shape(name) != shape:
        raise DamagedCapture(f"{file.path} is damaged: {name!r} is not {dtype} of shape {list(shape)}.")
