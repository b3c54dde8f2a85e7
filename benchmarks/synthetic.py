"""Captures in the real format that no engine made: of any size, their payload real bytes or holes in files.

Every row is of the prompt of one request, computed in one step; every layer has the four sites of attention.
Shards are written by the tensor writer of the store, documents from its records; digests are those of rows,
so that `localize verify` finds the capture sound. Only the prefixes are made up.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import xxhash

from localizer.store import schema, tensors
from localizer.store.digest import XXH3
from localizer.store.schema import (
    COLUMNS,
    ROW_INDEX,
    Coverage,
    Manifest,
    Model,
    Observer,
    Open,
    Output,
    Shard,
    Site,
    Source,
    Workload,
)
from localizer.store.writer import SHARD_BYTES, SHARD_ROWS
from localizer.wire.spec import ALL_ROWS, SITE_KINDS

SHAPE = (32, 128)
ROW_BYTES = 2 * 32 * 128
"""A row of every site is bfloat16 of this shape."""


@dataclass(frozen=True)
class Size:
    """What a capture holds.

    Attributes:
        rows, layers: each row is recorded at four sites of each layer.
        kept: how many of the sites, the first ones, keep their rows.
        holes: rows are zero, and lie in files that take no room on the disk.
    """

    rows: int
    layers: int = 32
    kept: int = 0
    holes: bool = False

    @property
    def sites(self) -> list[Site]:
        names = [f"model.layers.{n}.self_attn.attn/{kind}" for n in range(self.layers) for kind in SITE_KINDS]
        return [Site(name=name, rows=ALL_ROWS, dtype="bfloat16", shape=SHAPE) for name in names]

    @property
    def payload_bytes(self) -> int:
        return self.rows * self.kept * ROW_BYTES


REQUEST_ROWS = 4096
"""Most rows of a request."""


def write(root: Path, name: str, size: Size) -> Path:
    """Write a capture `name`, and return its folder."""
    folder = root / name / "0001"
    (folder / "rank-0").mkdir(parents=True)
    (folder / schema.JOURNAL).touch()
    (folder / schema.LOG).write_text("a synthetic capture\n")
    lengths = [min(REQUEST_ROWS, size.rows - start) for start in range(0, size.rows, REQUEST_ROWS)]
    tensors.replace(folder / schema.OPEN, schema.encode(_open(name, lengths)))
    step = min(SHARD_ROWS, max(1, SHARD_BYTES // max(1, size.kept * ROW_BYTES)))
    shards: list[Shard] = []
    for number, start in enumerate(range(0, size.rows, step)):
        shards += _set(folder, number, range(start, min(start + step, size.rows)), lengths, size)
    lines = b"".join(msgspec.json.encode(shard) + b"\n" for shard in shards)
    (folder / schema.JOURNAL).write_bytes(lines)
    for document in (schema.OPEN, schema.JOURNAL, schema.LOG):
        path = folder / document
        shards.append(Shard(name=document, size=path.stat().st_size, xxh3_128=tensors.file_digest(path)))
    tensors.replace(folder / schema.MANIFEST, schema.encode(_manifest(lengths, size, shards)))
    return folder


def _set(folder: Path, number: int, rows: range, lengths: list[int], size: Size) -> list[Shard]:
    """Write the shards of some rows."""
    rng = np.random.default_rng(rows.start)
    index, count = np.arange(rows.start, rows.stop), len(rows)
    table = {column: np.zeros(count, dtype) for column, dtype in COLUMNS.items()}
    table["request"][:] = table["step"][:] = index // REQUEST_ROWS
    table["position"][:] = index % REQUEST_ROWS
    last = table["position"] == np.array(lengths)[table["request"]] - 1
    table["logits"][last] = schema.DECIDES_TOKEN
    table["sampled"][:] = np.where(last, 0, -1)
    table["prefix"] = rng.integers(1, 256, (count, 16), np.uint8)
    digest = rng.integers(0, 256, (count, len(size.sites), 16), np.uint8)
    payload = {}
    for column, site in enumerate(size.sites[: size.kept]):
        raw = np.zeros((1, ROW_BYTES), np.uint8)
        if not size.holes:
            raw = rng.integers(0, 1 << 63, (count, ROW_BYTES // 8), np.int64).view(np.uint8)
            payload[site.name] = raw.view(ml_dtypes.bfloat16).reshape(count, *SHAPE)
            payload[site.name + ROW_INDEX] = np.arange(count)
        found = b"".join(map(xxhash.xxh3_128_digest, raw))
        digest[:, column] = np.frombuffer(found, np.uint8).reshape(-1, 16)
    bits = np.packbits(np.ones((count, len(size.sites)), np.bool_), axis=1, bitorder="little")
    facts = {"algorithm": XXH3, "sites": msgspec.to_builtins(size.sites)}
    shards = [
        _shard(folder, f"rank-0/rows-{number:05d}.safetensors", table, {"kinds": schema.KINDS}),
        _shard(
            folder, f"rank-0/digests-{number:05d}.safetensors", {"digest": digest, "present": bits}, facts
        ),
    ]
    name = f"rank-0/payload-{number:05d}.safetensors"
    if payload:
        shards.append(_shard(folder, name, payload, {}))
    elif size.kept:
        shards.append(_with_holes(folder, name, tuple(site.name for site in size.sites[: size.kept]), count))
    return shards


def _shard(folder: Path, name: str, arrays: dict[str, np.ndarray], facts: dict[str, object]) -> Shard:
    size, digest = tensors.write(folder / name, arrays, json.dumps(facts))
    return Shard(name=name, size=size, xxh3_128=digest)


def _with_holes(folder: Path, name: str, sites: tuple[str, ...], count: int) -> Shard:
    """Write a payload shard of zeros without those of its blocks that are zero."""
    size, digest, blocks = _zeros(sites, count)
    with (folder / name).open("wb") as file:
        for start, block in blocks:
            file.seek(start)
            file.write(block)
        file.truncate(size)
    return Shard(name=name, size=size, xxh3_128=digest)


@lru_cache(maxsize=2)
def _zeros(sites: tuple[str, ...], count: int) -> tuple[int, str, list[tuple[int, bytes]]]:
    """Size, digest and the blocks that are not zero of a payload shard of zeros."""
    payload: dict[str, np.ndarray] = {}
    for site in sites:
        payload[site] = np.zeros((count, *SHAPE), ml_dtypes.bfloat16)
        payload[site + ROW_INDEX] = np.arange(count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "payload"
        size, digest = tensors.write(path, payload, "{}")
        blob = path.read_bytes()
    starts = (start for start in range(0, size, 4096) if blob[start : start + 4096].strip(b"\0"))
    return size, digest, [(start, blob[start : start + 4096]) for start in starts]


def _open(name: str, lengths: list[int]) -> Open:
    return Open(
        format=schema.FORMAT,
        schema=schema.SCHEMA,
        name=name,
        number=1,
        created="2026-01-01T00:00:00+00:00",
        localizer="synthetic",
        host={},
        source=Source(python="", python_version="", vllm="none", vllm_location="", torch="none"),
        workload=Workload(
            model=Model(name="synthetic", path=""),
            matrix=[len(lengths)],
            repeats=1,
            prompt_tokens=max(lengths),
            max_tokens=1,
            seed=0,
            prompts=[[0] * length for length in lengths],
            sampling={},
            engine={},
        ),
        environment={},
        observer=Observer(taps=True, layers="all", payload="all", changes=[]),
    )


def _manifest(lengths: list[int], size: Size, files: list[Shard]) -> Manifest:
    outputs = [
        Output(
            request=schema.request_name(0, index),
            internal=str(index),
            external=str(index),
            tokens=[0],
            finish="length",
            cached_tokens=0,
        )
        for index in range(len(lengths))
    ]
    return Manifest(
        format=schema.FORMAT,
        schema=schema.SCHEMA,
        state="complete",
        reasons=[],
        outputs=outputs,
        sites=size.sites,
        coverage={site.name: Coverage(expected=size.rows, recorded=size.rows) for site in size.sites},
        not_applicable={},
        counts={"rows": size.rows},
        engine={},
        durations={"total": 0.0},
        peak_memory_bytes={},
        files=files,
    )
