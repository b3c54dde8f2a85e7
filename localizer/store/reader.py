"""Reading a capture: nothing is trusted before it is checked, nothing large is read before it is needed."""

from __future__ import annotations

import os
import re
import stat
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import msgspec
import numpy as np

from localizer.errors import DamagedCapture, NotACapture
from localizer.store import ranks, schema, scratch, tensors, trace
from localizer.store.digest import BY_SITE, XXH3, row_digest, shard_algorithm
from localizer.store.expected import applicable
from localizer.store.schema import (
    COLUMNS,
    DIGEST_BYTES,
    UNFINISHED,
    Manifest,
    Open,
    Prompt,
    Shard,
    Site,
)
from localizer.store.sets import RowSet, Table, stack
from localizer.store.trace import StepTrace
from localizer.wire.spec import TOKEN_ROWS

__all__ = ["Capture", "Table"]

SHARD_NAME = re.compile(
    r"rank-(0|[1-9]\d{0,4})/(rows|digests|payload)-(\d{5}|[1-9]\d{5,8})\.safetensors", re.ASCII
)

OPEN_FILES = 16
"""Shards whose headers are remembered at a time; those of all sets would take hundreds of megabytes."""


class _Facts(msgspec.Struct, frozen=True):
    """Metadata of a digest shard."""

    algorithm: str
    sites: list[Site]


class Capture:
    """A capture on disk, complete or not.

    `phase` is the name of the phase of which it is a view (`localizer.store.phases`); empty for the whole.

    Args:
        folder: the numbered folder, e.g. `captures/candidate/0001`.
        shown: what is said of where it lies, such as `x.zip:candidate`; the folder unless given.

    Raises:
        NotACapture: there is no open.json.
        DamagedCapture: a document is malformed, or two of them contradict each other.
    """

    phase = ""

    def __init__(self, folder: Path, shown: str = "") -> None:
        self.folder = folder
        self.shown = shown or os.fsencode(folder).decode(errors="backslashreplace")
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
        self._opened = lru_cache(OPEN_FILES)(tensors.TensorFile)
        self._checked: set[tuple[int, str]] = set()

    @property
    def label(self) -> str:
        """NAME/NNNN as the person types it."""
        return f"{self.open.name}/{self.open.number:04d}"

    @property
    def complete(self) -> bool:
        return self.manifest is not None and self.manifest.state == schema.COMPLETE

    @property
    def state(self) -> str:
        """The same as a word, also of a capture without a manifest."""
        return schema.COMPLETE if self.complete else schema.INCOMPLETE

    @property
    def reasons(self) -> list[str]:
        """Why the capture is incomplete; empty when it is complete."""
        if self.manifest is None:
            missing = ranks.absent(self.missing_ranks)
            return ["it has no manifest: the run was killed, interrupted or failed", *missing]
        return list(self.manifest.reasons)

    @property
    def missing_ranks(self) -> list[int]:
        """Workers that left no rows, where others did or should have."""
        if self.open.observer.ranks == 1 or not self.open.observer.taps:
            return []
        there = {int(match[1]) for file in self.files if (match := SHARD_NAME.fullmatch(file.name))}
        return [rank for rank in range(self.open.observer.ranks) if rank not in there]

    @cached_property
    def requests(self) -> list[str]:
        """Request ids in the order of the workload."""
        work = self.open.workload
        return [name for names in schema.rounds(work.matrix, work.repeats) for name in names]

    @cached_property
    def prompts(self) -> dict[str, Prompt]:
        """Prompt token ids by request, or what stands for them."""
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
                if self.manifest is None and (number == len(lines) or self.open.observer.ranks > 1):
                    continue  # a killed run leaves a torn last line, behind which other ranks may go on
                raise DamagedCapture(
                    f"{path} is damaged in line {number}; fetch the capture again."
                ) from None
            match = SHARD_NAME.fullmatch(shard.name) or trace.NAME.fullmatch(shard.name)
            if match is None or int(match[1]) >= self.open.observer.ranks:
                raise DamagedCapture(f"{path} lists the foreign file {shard.name[:80]!r} in line {number}.")
            shards.append(shard)
        if len({shard.name for shard in shards}) != len(shards):
            raise DamagedCapture(f"{path} lists a file twice; fetch the capture again.")
        return shards

    def _path(self, file: Shard) -> Path:
        """Where a listed file lies: a plain file of the recorded size, reached through no link."""
        path = self.folder / file.name
        try:
            found = os.lstat(path)
            plain = stat.S_ISREG(found.st_mode) and (
                path.parent == self.folder or not path.parent.is_symlink()
            )
        except OSError:
            plain = False
        if not plain:
            raise DamagedCapture(f"{path} is missing or not a plain file; fetch the capture again.")
        if found.st_size != file.size:
            raise DamagedCapture(
                f"{path} has {found.st_size} bytes instead of {file.size}; fetch the capture again."
            )
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

    def check(self, *, payload: bool = True) -> None:
        """Check every listed file, then that tables and payload fit together.

        Without `payload`, of the payload shards only sizes and headers are looked at: every row of them that
        is read later is checked then.

        Raises:
            DamagedCapture: something does not; the message names the first such file.
        """
        for file in self.files:
            match = SHARD_NAME.fullmatch(file.name)
            if payload or match is None or match[2] != "payload":
                self.check_file(file)
        _ = self.table, self.payload
        if payload:
            for part in self.sets:
                for site in part.kept():
                    self._check_kept(part, site)

    def _shards(self, what: str) -> dict[tuple[int, int], Path]:
        """Paths of the listed shards of a kind, by rank and number of their set."""
        found = {}
        for file in self.files:
            match = SHARD_NAME.fullmatch(file.name)
            if match and match[2] == what:
                found[int(match[1]), int(match[3])] = self._path(file)
        return dict(sorted(found.items()))

    # -- tables ----------------------------------------------------------------------------------------

    @cached_property
    def _digest_shards(self) -> dict[tuple[int, int], tuple[Path, tuple[Site, ...]]]:
        known: dict[str, tuple[Site, ...]] = {}  # most sets say the same of their sites
        shards = {}
        for key, path in self._shards("digests").items():
            text = self._opened(path).metadata
            if text not in known:
                known[text] = self._sites_of(path, text)
            shards[key] = path, known[text]
        return shards

    def _sites_of(self, path: Path, metadata: str) -> tuple[Site, ...]:
        """The sites that a digest shard names in its metadata."""
        try:
            facts = schema.parse(metadata.encode("utf-8", "surrogatepass"), _Facts)
        except ValueError as error:
            raise DamagedCapture(f"{path} is damaged: its metadata is malformed ({error}).") from None
        if facts.algorithm not in (XXH3, BY_SITE):
            raise DamagedCapture(
                f"{path} holds {facts.algorithm[:40]!r} digests; this localizer reads {XXH3} and {BY_SITE}."
            )
        if facts.algorithm != shard_algorithm([site.digest for site in facts.sites]):
            raise DamagedCapture(f"{path} is damaged: its sites have other digests than it says.")
        if len({site.name for site in facts.sites}) != len(facts.sites):
            raise DamagedCapture(f"{path} is damaged: it names a site twice.")
        return tuple(facts.sites)

    @cached_property
    def sites(self) -> list[Site]:
        """Sites in execution order."""
        if self.manifest is not None:
            return list(self.manifest.sites)
        last = {rank: sites for (rank, _), (_, sites) in self._digest_shards.items()}
        return ranks.side_by_side([[(site.name, site) for site in sites] for sites in last.values()])

    @cached_property
    def _columns(self) -> dict[str, int]:
        """The column of each site in the table, by name."""
        return {site.name: number for number, site in enumerate(self.sites)}

    @cached_property
    def sets(self) -> list[RowSet]:
        """The sets of shards, by their place in the table."""
        rows, digests, payload = self._shards("rows"), self._digest_shards, self._shards("payload")
        if self.manifest is not None and set(rows) != set(digests):
            raise DamagedCapture(f"{self.folder} lists row and digest shards that do not belong together.")
        both = [key for key in rows if key in digests]  # a killed run may leave rows without digests
        for key, path in payload.items():
            if key not in both:
                raise DamagedCapture(f"{path} holds payload without its row table.")
        sets: list[RowSet] = []
        for key in both:
            path, sites = digests[key]
            rank, (columns, index) = key[0], self._columns_of_ranks[key[0]]
            count = _fitting(self._opened(rows[key]), self._opened(path), sites, index)
            for site in sites:
                if site.dtype and site.digest != self.sites[self._columns[site.name]].digest:
                    raise DamagedCapture(f"{path} is damaged: {site.name} has another digest elsewhere.")
            target = np.array([index[site.name] for site in sites], np.int64)
            order = None if np.array_equal(target, np.arange(len(target))) else np.argsort(target)
            start = sets[-1].start + sets[-1].count if sets and sets[-1].rank == rank else 0
            kept = payload.get(key)
            sets.append(
                RowSet(rows[key], path, kept, start, count, sites, order, self._opened, rank, columns)
            )
        return sets

    @cached_property
    def _columns_of_ranks(self) -> Mapping[int, tuple[np.ndarray | slice, dict[str, int]]]:
        """For each rank the columns of its sites in the table, and the order of these sites by name."""
        if self.open.observer.ranks == 1:
            return {0: (slice(None), self._columns)}
        last = {rank: (path, sites) for (rank, _), (path, sites) in self._digest_shards.items()}
        found = ranks.columns(last, self._columns)
        held = sum(len(mine) for _, mine in found.values())
        if held != len(self.sites) and not self.missing_ranks:
            raise DamagedCapture(f"{self.folder} is damaged: no rank holds some of its sites.")
        return found

    @cached_property
    def site_ranks(self) -> list[int]:
        """The rank that recorded each site; 0 for one that none did."""
        found = [0] * len(self.sites)
        for rank, (columns, _) in self._columns_of_ranks.items():
            for column in columns.tolist() if isinstance(columns, np.ndarray) else ():
                found[column] = rank
        return found

    @cached_property
    def table(self) -> Table:
        """The row table with its digests: the columns joined over all sets, the digests left in the files."""
        if self.open.observer.ranks == 1:
            columns = self._rows_of(self.sets)
            return Table(columns, columns.pop("prefix"), *stack(self.sets, len(self.sites)))
        columns, parts = self._joined
        if self.complete and self.short:
            raise DamagedCapture(
                f"{self.folder} is damaged: it is said to be complete, but {self.short[0]}; "
                "fetch or make the capture again."
            )
        columns = dict(columns)
        prefix = columns.pop("prefix")
        return Table(columns, prefix, *ranks.join(parts, len(prefix), len(self.sites)))

    def _rows_of(self, sets: Sequence[RowSet]) -> dict[str, np.ndarray]:
        """Columns and prefixes of the row tables of some sets, one after the other."""
        if len(sets) == 1:
            return self._row_table(sets[0].rows)
        total = sum(part.count for part in sets)
        columns = {name: scratch.zeros(total, dtype) for name, dtype in COLUMNS.items()}
        columns["prefix"] = scratch.zeros((total, DIGEST_BYTES), np.uint8)
        for part in sets:
            for name, column in self._row_table(part.rows).items():
                columns[name][part.start : part.start + part.count] = column
        return columns

    @cached_property
    def _by_rank(self) -> dict[int, list[RowSet]]:
        """The sets of each rank that has any."""
        found: dict[int, list[RowSet]] = {}
        for part in self.sets:
            found.setdefault(part.rank, []).append(part)
        return found

    @cached_property
    def _joined(self) -> tuple[dict[str, np.ndarray], list[ranks.RankRows]]:
        """The row table of the rank that has most rows, and what each rank has of it."""
        return ranks.joined(self._by_rank, self._rows_of)

    @cached_property
    def short(self) -> list[str]:
        """Which ranks lack rows that another one has, in sentences; none where there is one rank."""
        if self.open.observer.ranks == 1:
            return []
        return ranks.short(*self._joined, self.missing_ranks)

    def _row_table(self, path: Path) -> dict[str, np.ndarray]:
        """The columns and prefixes of one set."""
        file = self._opened(path)
        columns = {name: file.array(name) for name in (*COLUMNS, "prefix")}
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
                raise DamagedCapture(f"{path} is damaged: column {name!r} holds values that do not exist.")
        return columns

    # -- payload ---------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> list[StepTrace]:
        """The schedule trace: what each step was asked for; empty where a capture has none.

        Of several ranks, which are scheduled alike, it is that of the lowest.
        """
        return self._trace(self.scheduled_by)

    @cached_property
    def _traced(self) -> list[tuple[int, int, Shard]]:
        """The shards of the schedule trace by rank and number."""
        named = [(file, match) for file in self.files if (match := trace.NAME.fullmatch(file.name))]
        return sorted(
            ((int(match[1]), int(match[2]), file) for file, match in named), key=lambda item: item[:2]
        )

    @property
    def scheduled_by(self) -> int:
        """The lowest rank that has a schedule trace."""
        return self._traced[0][0] if self._traced else 0

    def _trace(self, rank: int) -> list[StepTrace]:
        shards = [file for owner, _, file in self._traced if owner == rank]
        return [step for file in shards for step in trace.read(self._path(file), len(self.requests))]

    def traces(self) -> Iterator[tuple[int, list[StepTrace]]]:
        """The schedule trace of each rank that has one."""
        for rank in dict.fromkeys(owner for owner, _, _ in self._traced):
            yield rank, self._trace(rank)

    @cached_property
    def payload(self) -> dict[str, int]:
        """How many rows were kept beside their digests, by site; sites without any are not there."""
        found: dict[str, int] = {}
        for part in self.sets:
            for name, count in part.kept().items():
                found[name] = found.get(name, 0) + count
        return found

    def row_payload(self, site: str, row: int) -> np.ndarray | None:
        """The stored row of a site, in its own dtype and shape; None where only the digest was kept.

        Raises:
            DamagedCapture: it does not have the digest that the table gives.
        """
        if site not in self.payload or not 0 <= row < len(self.table):
            return None
        part = self._set_of(site, row)
        if row >= self.rows_of(part.rank) or not part.keeps(site):
            return None
        self._check_kept(part, site)
        found = part.row(site, row - part.start)
        if found is not None:
            self.check_row(site, row, found)
        return found

    def check_row(self, site: str, row: int, found: np.ndarray) -> None:
        """Check that a stored row is the one of which the table has the digest.

        Raises:
            DamagedCapture: it is not.
        """
        column = self._columns[site]
        wanted = self.table.digest[row, column].tobytes()
        if (
            not self.table.present[row, column]
            or row_digest(self.sites[column].digest, found.tobytes()) != wanted
        ):
            raise self.damaged_row(site, row)

    def damaged_row(self, site: str, row: int) -> DamagedCapture:
        """What is said of a stored row that does not have its digest."""
        part = self._set_of(site, row)
        return DamagedCapture(
            f"{part.payload} is damaged: row {row} of {site} does not have its digest; "
            "fetch or make the capture again."
        )

    def rows_of(self, rank: int) -> int:
        """How many of the first rows of the table a rank has."""
        if self.open.observer.ranks == 1:
            return len(self.table)
        return sum(part.rows for part in self._joined[1] if part.rank == rank)

    def known(self, part: RowSet) -> int:
        """How many of the first rows of a set are rows of the table; what else a rank computed is none."""
        return max(0, min(part.count, self.rows_of(part.rank) - part.start))

    def _set_of(self, site: str, row: int) -> RowSet:
        """The set of the site's rank that holds a row."""
        sets = self._by_rank[self.site_ranks[self._columns[site]]]
        return sets[bisect_right(sets, row, key=lambda part: part.start) - 1]

    def _check_kept(self, part: RowSet, site: str) -> None:
        """Check, once, which rows of a set are said to be kept of a site."""
        key = part.start, site
        if key not in self._checked:
            part.check_kept_rows(site)
            self._checked.add(key)


def _rows(file: tensors.TensorFile) -> int:
    """The number of rows of a set."""
    if "position" not in file or len(file.shape("position")) != 1:
        raise DamagedCapture(f"{file.path} is damaged: it has no column 'position'.")
    return file.shape("position")[0]


def _fitting(
    rows: tensors.TensorFile,
    digests: tensors.TensorFile,
    sites: tuple[Site, ...],
    index: dict[str, int],
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
