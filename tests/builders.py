"""Synthetic captures in the real format, written by the real writer from a few parameters.

The rows come from a toy model (toy.py) in a toy engine (rounds.py): a row is drawn from a hash of its prefix
and site, so that rows of equal prefix have equal bytes in every capture, and any change is one that a test
planted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from rounds import record
from toy import VOCABULARY, Change, attention, bump, put, toy_row, toy_token

from localizer.capture.ranks import merged
from localizer.store import schema, tensors
from localizer.store.digest import XXH3
from localizer.store.interventions import Intervention
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
from localizer.store.trace import TraceWriter
from localizer.store.writer import RankWriter
from localizer.wire.ranks import Naming
from localizer.wire.rowsum import ROWSUM
from localizer.wire.spec import (
    ALL_ROWS,
    AUXILIARY,
    DRAFT,
    DRAFT_LOGIT_ROWS,
    DRAFT_ROWS,
    HIDDEN,
    INPUT_IDS,
    LOGIT_ROWS,
    LOGITS,
    POSITIONS,
    SITE_KINDS,
    TOKEN,
    TOKEN_ROWS,
)

__all__ = [
    "BFLOAT16", "Change", "Plan", "Where", "attention", "bare", "bump", "drafted", "pair", "put", "toy_row",
    "toy_token", "write",
]  # fmt: skip

HEADS, HEAD_DIM, WIDTH = 3, 4, 8

Where = tuple[str, int, str]
"""(request, position, site); a draft's site ends with `@` and the draft step, see `drafted`."""


@dataclass(frozen=True)
class Plan:
    """A capture to be written.

    Attributes:
        layers: number of attention layers, or the numbers of those that are tapped.
        after_attention: what follows the attention of layer 1: ends of names, such as `.mlp`.
        observed: what open.json says of the layers.
        outputs: tokens by request where they are not the toy model's.
        changes: planted changes by (request, position, site).
        absent: (request, position, site) that are never recorded.
        payload: sites whose rows are kept; None keeps all.
        hashed: the rows of sites that keep no payload come as digests, as from a GPU.
        manifest: False leaves the capture as a killed run does.
        chunk: prompt tokens computed per step; None computes a prompt at once.
        only_tokens: record nothing but what vLLM returned.
        speculate: draft tokens of a proposal; 0 does not speculate.
        method: "eagle3" has auxiliary hidden states, "eagle" and "draft_model" have none; "ngram" no draft.
        traced: with a schedule trace.
        manifested: further fields of the manifest.
        intervention: what open.json says of phases; `repeats` are then the passes of all of them.
        cached: prompt tokens taken from the prefix cache, by request, as vLLM returned it.
        ranks: workers; each computes the rows of a single one, and calls its sites as `named` says.
        absent_ranks: those of them that leave nothing.
        cut: steps after which a rank ends, by rank.
        proposals: tokens proposed after (request, base position) where they are not the toy draft's.
    """

    name: str = "candidate"
    number: int = 1
    layers: int | tuple[int, ...] = 3
    after_attention: tuple[str, ...] = ()
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
    hashed: bool = False
    manifest: bool = True
    state: str = "complete"
    reasons: tuple[str, ...] = ()
    unfinished: frozenset[str] = frozenset()
    chunk: int | None = None
    only_tokens: bool = False
    speculate: int = 0
    method: str = "eagle3"
    proposals: Mapping[tuple[str, int], Sequence[int]] = field(default_factory=dict)
    draft_files: Mapping[str, str] = field(default_factory=dict)
    model_files: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    running: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    overlay: Mapping[str, str] | None = None
    vllm: str = "0.32.0"
    traced: bool = False
    manifested: Mapping[str, Any] = field(default_factory=dict)
    intervention: Intervention | None = None
    cached: Mapping[str, int] = field(default_factory=dict)
    layouts: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    ranks: int = 1
    absent_ranks: frozenset[int] = frozenset()
    cut: Mapping[int, int] = field(default_factory=dict)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        return tuple(range(self.layers)) if isinstance(self.layers, int) else self.layers

    @property
    def draft_layers(self) -> tuple[int, ...]:
        """Numbers of the draft's layers: they go on from the target's, but for a draft model's own."""
        if not self.speculate or self.method == "ngram":
            return ()
        return (0, 1) if self.method == "draft_model" else (max(self.layer_numbers) + 1,)

    @property
    def requests(self) -> list[str]:
        return [name for names in schema.rounds(list(self.matrix), self.repeats) for name in names]

    def digest(self, site: Site) -> str:
        """The algorithm of a site's row digests."""
        kept = self.payload is None or site.name in self.payload
        return ROWSUM if self.hashed and not kept and site.rows != TOKEN_ROWS else XXH3

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

    def sites(self, rank: int = 0) -> list[Site]:
        """All sites of a rank in execution order, with their layouts."""
        naming = named(rank, self.ranks)
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
            if number == 1:
                more = [f"model.layers.1{end}" for end in self.after_attention]
                sites += [_site(name, ALL_ROWS, self.dtype, (WIDTH,)) for name in more]
        if self.speculate and self.method == "eagle3":
            sites += [_site(f"{AUXILIARY}/{index}", ALL_ROWS, self.dtype, (WIDTH,)) for index in range(3)]
        sites += [
            _site(HIDDEN, LOGIT_ROWS, self.dtype, (WIDTH,)),
            _site(LOGITS, LOGIT_ROWS, self.dtype, (VOCABULARY,)),
        ]
        for number in self.draft_layers:
            if number == self.draft_layers[0]:
                sites.append(_site(DRAFT + INPUT_IDS, DRAFT_ROWS, "int32", ()))
                sites.append(_site(DRAFT + POSITIONS, DRAFT_ROWS, "int64", ()))
            sites += [
                _site(DRAFT + attention(number, kind), DRAFT_ROWS, self.dtype, shapes[kind])
                for kind in SITE_KINDS
            ]
        if self.draft_layers:
            sites.append(_site(DRAFT + HIDDEN, DRAFT_LOGIT_ROWS, self.dtype, (WIDTH,)))
            sites.append(_site(DRAFT + LOGITS, DRAFT_LOGIT_ROWS, self.dtype, (VOCABULARY,)))
        sites.append(_site(TOKEN, TOKEN_ROWS, "int64", ()))
        sites = [
            _site(site.name, site.rows, *self.layouts[site.name]) if site.name in self.layouts else site
            for site in sites
        ]
        return [msgspec.structs.replace(site, name=naming(site.name)) for site in sites]


def named(rank: int, ranks: int) -> Naming:
    """What a rank of the toy model holds: the part of its number of queries, keys, values and outputs.

    Its range is as large as all of them on a single worker; so the numbers differ from that one's.
    """
    layers = range(64)
    held = {attention(layer, kind): (rank, ranks, False) for layer in layers for kind in SITE_KINDS}
    return Naming(rank, ranks, held | {DRAFT + name: part for name, part in held.items()})


def write(root: Path, plan: Plan) -> Path:
    """Write the capture under `root` and return its folder."""
    folder = root / plan.name / f"{plan.number:04d}"
    folder.mkdir(parents=True)
    tensors.replace(folder / schema.OPEN, schema.encode(_open(plan)))
    (folder / schema.JOURNAL).touch()
    (folder / schema.LOG).write_text("a synthetic capture\n")
    written = {
        rank: _write_rank(folder, plan, rank) for rank in range(plan.ranks) if rank not in plan.absent_ranks
    }
    if plan.manifest:
        report = merged(written)
        coverage = {
            name: Coverage(expected=expected, recorded=report["recorded"][name])
            for name, expected in report["expected"].items()
        }
        sites = [site["site"] for site in report["sites"]]
        manifest = _manifest(plan, folder, sites, coverage, report["counts"])
        tensors.replace(folder / schema.MANIFEST, schema.encode(manifest))
    return folder


def _write_rank(folder: Path, plan: Plan, rank: int) -> dict[str, Any]:
    """Write the rows of one rank; return what its writer would say."""
    prompts = [plan.prompt(request) for request in plan.requests]
    writer = RankWriter(folder, rank, plan.requests, prompts)
    sites = [] if plan.only_tokens else plan.sites(rank)
    writer.register([bare(site) for site in sites], plan.payload)
    trace = TraceWriter(folder, rank, plan.requests) if plan.traced else None
    if not plan.only_tokens:
        record(writer, plan, trace, rank)
    summary = writer.close()
    traced = {} if trace is None else {"traced_steps": trace.close()}
    return {
        "sites": [{"name": site.name, "site": site} for site in summary.sites],
        "expected": summary.expected,
        "recorded": summary.recorded,
        "counts": summary.counts | traced,
        "complaints": summary.complaints,
        "journal": 0,
        **{table: {} for table in ("not_applicable", "untapped", "code")},
    }


def drafted(site: str, step: int) -> str:
    """A draft's site in a certain draft step, as plans name it."""
    return f"{DRAFT}{site}@{step}"


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
            draft=Model(name="toy-draft", path="/models/draft", files=dict(plan.draft_files))
            if plan.draft_layers
            else None,
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
        observer=Observer(
            taps=not plan.only_tokens, layers=plan.observed, payload="all", changes=[], ranks=plan.ranks
        ),
        intervention=plan.intervention,
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
            cached_tokens=plan.cached.get(name, 0),
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
        **plan.manifested,
    )


def pair(root: Path, plan: Plan | None = None, **candidate: Any) -> tuple[Path, Path]:
    """A candidate and its parent: the same plan, but for the candidate's keyword arguments."""
    plan = plan or Plan()
    return write(root, replace(plan, name="candidate", **candidate)), write(
        root, replace(plan, name="parent")
    )


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
