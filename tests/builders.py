"""Synthetic captures in the real format, written by the real writer from a few parameters.

The rows come from a toy model: a row is drawn from a hash of its prefix and site, so that rows of equal
prefix have equal bytes in every capture, and any change is one that a test planted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from localizer.store import schema, tensors
from localizer.store.dtypes import NUMPY
from localizer.store.prefix import prefix_digest
from localizer.store.schema import (
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
from localizer.store.writer import RankWriter
from localizer.wire.spec import (
    ALL_ROWS,
    HIDDEN,
    INPUT_IDS,
    LOGIT_ROWS,
    LOGITS,
    POSITIONS,
    SITE_KINDS,
    TOKEN,
    TOKEN_ROWS,
)

HEADS, HEAD_DIM, WIDTH, VOCABULARY = 3, 4, 8, 16

Where = tuple[str, int, str]
"""(request, position, site)."""

Change = Callable[[np.ndarray], np.ndarray]
"""Takes the row as computed and returns the row as recorded."""


@dataclass(frozen=True)
class Plan:
    """A capture to be written.

    Attributes:
        layers: number of attention layers, or the numbers of those that are tapped.
        observed: what open.json says of the layers.
        outputs: tokens by request where they are not the toy model's.
        changes: planted changes by (request, position, site).
        absent: (request, position, site) that are never recorded.
        payload: sites whose rows are kept; None keeps all.
        manifest: False leaves the capture as a killed run does.
        chunk: prompt tokens computed per step; None computes a prompt at once.
        only_tokens: record nothing but what vLLM returned.
    """

    name: str = "candidate"
    number: int = 1
    layers: int | tuple[int, ...] = 3
    observed: str = "all"
    prompts: tuple[tuple[int, ...], ...] = ((1, 2, 3), (4, 5, 6))
    matrix: tuple[int, ...] = (1, 2)
    repeats: int = 1
    max_tokens: int = 4
    dtype: str = "bfloat16"
    outputs: Mapping[str, Sequence[int]] = field(default_factory=dict)
    changes: Mapping[Where, Change] = field(default_factory=dict)
    absent: frozenset[Where] = frozenset()
    payload: frozenset[str] | None = None
    manifest: bool = True
    state: str = "complete"
    reasons: tuple[str, ...] = ()
    unfinished: frozenset[str] = frozenset()
    chunk: int | None = None
    only_tokens: bool = False
    model_files: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    running: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    overlay: Mapping[str, str] | None = None
    vllm: str = "0.32.0"
    layouts: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        return tuple(range(self.layers)) if isinstance(self.layers, int) else self.layers

    @property
    def requests(self) -> list[str]:
        return [name for names in schema.rounds(list(self.matrix), self.repeats) for name in names]

    def prompt(self, request: str) -> tuple[int, ...]:
        return self.prompts[int(request.rpartition(".")[2])]

    def tokens(self, request: str) -> list[int]:
        """The tokens a request returns."""
        if request in self.outputs:
            return list(self.outputs[request])
        known = list(self.prompt(request))
        for _ in range(self.max_tokens):
            known.append(toy_token(known))
        return known[len(self.prompt(request)) :]

    def sites(self) -> list[Site]:
        """All sites in execution order, with their layouts."""
        shapes = {
            "query": (HEADS, HEAD_DIM),
            "key": (1, HEAD_DIM),
            "value": (1, HEAD_DIM),
            "output": (WIDTH,),
        }
        sites = [_site(INPUT_IDS, ALL_ROWS, "int32", ()), _site(POSITIONS, ALL_ROWS, "int64", ())]
        for number in self.layer_numbers:
            sites += [
                _site(attention(number, kind), ALL_ROWS, self.dtype, shapes[kind]) for kind in SITE_KINDS
            ]
        sites += [
            _site(HIDDEN, LOGIT_ROWS, self.dtype, (WIDTH,)),
            _site(LOGITS, LOGIT_ROWS, self.dtype, (VOCABULARY,)),
            _site(TOKEN, TOKEN_ROWS, "int64", ()),
        ]
        return [
            _site(site.name, site.rows, *self.layouts[site.name]) if site.name in self.layouts else site
            for site in sites
        ]


def attention(layer: int, kind: str) -> str:
    """The name of an attention site."""
    return f"model.layers.{layer}.self_attn.attn/{kind}"


def toy_token(tokens: Sequence[int]) -> int:
    """The token that the toy model returns after `tokens`."""
    return prefix_digest(tokens)[0] % (VOCABULARY - 4) + 2


def toy_row(tokens: Sequence[int], site: Site) -> np.ndarray:
    """The row of a site at the last of `tokens`."""
    shape = site.shape or ()
    if site.name in (INPUT_IDS, POSITIONS):
        value = {INPUT_IDS: tokens[-1], POSITIONS: len(tokens) - 1}[site.name]
        return np.full(shape, value, NUMPY[site.dtype])
    seed = int.from_bytes(prefix_digest(tokens, site.name.encode())[:8], "little")
    random = np.random.Generator(np.random.PCG64(seed))
    if NUMPY[site.dtype].kind in "iu":
        return random.integers(1, 100, shape).astype(NUMPY[site.dtype])
    row = random.uniform(0.5, 1.5, shape).astype(NUMPY[site.dtype])
    if site.name == LOGITS:
        row[toy_token(tokens)] = 4.0
    return row


def bump(index: tuple[int, ...] = (0,), ulps: int = 1) -> Change:
    """A change of one element by some units in the last place."""

    def change(row: np.ndarray) -> np.ndarray:
        bits = row.copy().view(np.dtype(f"u{row.dtype.itemsize}"))
        bits[index] += ulps
        return bits.view(row.dtype)

    return change


def put(value: float, index: tuple[int, ...] = (0,)) -> Change:
    """A change of one element to a value."""

    def change(row: np.ndarray) -> np.ndarray:
        row = row.copy()
        row[index] = value
        return row

    return change


def write(root: Path, plan: Plan) -> Path:
    """Write the capture under `root` and return its folder."""
    folder = root / plan.name / f"{plan.number:04d}"
    folder.mkdir(parents=True)
    tensors.replace(folder / schema.OPEN, schema.encode(_open(plan)))
    (folder / schema.JOURNAL).touch()
    (folder / schema.LOG).write_text("a synthetic capture\n")
    prompts = [plan.prompt(request) for request in plan.requests]
    writer = RankWriter(folder, 0, plan.requests, prompts)
    writer.register([bare(site) for site in ([] if plan.only_tokens else plan.sites())], plan.payload)
    if not plan.only_tokens:
        _record(writer, plan)
    summary = writer.close()
    if plan.manifest:
        counts = dict(summary.counts)
        coverage = {
            site.name: Coverage(expected=summary.expected[site.name], recorded=summary.recorded[site.name])
            for site in summary.sites
        }
        manifest = _manifest(plan, folder, summary.sites, coverage, counts)
        tensors.replace(folder / schema.MANIFEST, schema.encode(manifest))
    return folder


def _record(writer: RankWriter, plan: Plan) -> None:
    """Compute the rounds one after the other, each request's prompt in chunks, then token by token."""
    sites = plan.sites()
    for index, site in enumerate(sites):
        writer.layout(index, site.dtype, site.shape or ())
    step = 0
    for names in schema.rounds(list(plan.matrix), plan.repeats):
        writer.round({f"{name}-internal": name for name in names})
        done = dict.fromkeys(names, 0)
        while True:
            counts = {name: count for name in names if (count := _next(plan, name, done[name]))}
            if not counts:
                break
            _step(writer, plan, sites, step, counts, done)
            for name, count in counts.items():
                done[name] += count
            step += 1


def _next(plan: Plan, request: str, done: int) -> int:
    """How many rows a request gets in its next step."""
    prompt, total = len(plan.prompt(request)), len(plan.prompt(request)) + len(plan.tokens(request)) - 1
    if done < prompt:
        return min(prompt - done, plan.chunk or prompt)
    return int(done < total)


def _step(
    writer: RankWriter,
    plan: Plan,
    sites: list[Site],
    step: int,
    counts: Mapping[str, int],
    done: Mapping[str, int],
) -> None:
    texts = {name: [*plan.prompt(name), *plan.tokens(name)] for name in counts}
    spots = [(name, position) for name in counts for position in range(done[name], done[name] + counts[name])]
    writer.begin_step(
        step,
        [f"{name}-internal" for name in counts],
        list(counts.values()),
        [texts[name][position] for name, position in spots],
        [position for _, position in spots],
        [1] * len(counts),
    )
    feeding = [(name, done[name] + count - 1) for name, count in counts.items()]
    for index, site in enumerate(sites[:-1]):  # the writer itself records the tokens
        for row, (name, position) in enumerate(spots if site.rows == ALL_ROWS else feeding):
            where = name, position, site.name
            if where not in plan.absent:
                array = toy_row(texts[name][: position + 1], site)
                array = plan.changes.get(where, lambda row: row)(array)
                writer.rows(index, row, 1, memoryview(np.ascontiguousarray(array).tobytes()))
    sampled = {
        f"{name}-internal": [texts[name][position + 1]]
        for name, position in feeding
        if len(plan.prompt(name)) <= position + 1 < len(texts[name])
    }
    writer.end_step(sampled)


def bare(site: Site) -> Site:
    """A site as it is registered, before its first row."""
    return Site(name=site.name, rows=site.rows)


def _site(name: str, rows: str, dtype: str, shape: tuple[int, ...]) -> Site:
    return Site(name=name, rows=rows, dtype=dtype, shape=shape)


def _open(plan: Plan) -> Open:
    return Open(
        format=schema.FORMAT,
        schema=schema.SCHEMA,
        name=plan.name,
        number=plan.number,
        created="2025-01-02T03:04:05+00:00",
        localizer="0.1.0",
        host={"system": "Linux"},
        source=Source(
            python="/usr/bin/python3",
            python_version="3.11.2",
            vllm=plan.vllm,
            vllm_location="/site-packages/vllm",
            torch="2.13.0",
            overlay=None
            if plan.overlay is None
            else schema.Overlay(path="/checkout", files=dict(plan.overlay)),
        ),
        workload=Workload(
            model=Model(name="toy", path="/models/toy", files=dict(plan.model_files)),
            matrix=list(plan.matrix),
            repeats=plan.repeats,
            prompt_tokens=len(plan.prompts[0]) if plan.prompts else 0,
            max_tokens=plan.max_tokens,
            seed=0,
            prompts=[list(prompt) for prompt in plan.prompts],
            sampling={"temperature": 0.0},
            engine=dict(plan.engine),
        ),
        environment=dict(plan.environment),
        observer=Observer(taps=not plan.only_tokens, layers=plan.observed, payload="all", changes=[]),
    )


def _manifest(
    plan: Plan, folder: Path, sites: list[Site], coverage: dict[str, Coverage], counts: dict[str, int]
) -> Manifest:
    outputs = [
        Output(
            request=name,
            internal=f"{name}-internal",
            external=str(number),
            tokens=plan.tokens(name),
            finish="abort" if name in plan.unfinished else "length",
            cached_tokens=0,
        )
        for number, name in enumerate(plan.requests)
    ]
    files = [
        Shard(
            name=str(path.relative_to(folder)),
            size=path.stat().st_size,
            xxh3_128=tensors.file_digest(path),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    return Manifest(
        format=schema.FORMAT,
        schema=schema.SCHEMA,
        state=plan.state,
        reasons=list(plan.reasons),
        outputs=outputs,
        sites=sites,
        coverage=coverage,
        not_applicable={},
        counts=counts,
        engine=dict(plan.running),
        durations={"total": 1.0},
        peak_memory_bytes={},
        files=files,
    )


def pair(root: Path, plan: Plan | None = None, **candidate: Any) -> tuple[Path, Path]:
    """A candidate and its parent: the same plan, but for the candidate's keyword arguments."""
    plan = plan or Plan()
    return write(root, replace(plan, name="candidate", **candidate)), write(
        root, replace(plan, name="parent")
    )


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
