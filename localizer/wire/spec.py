"""The specification of one run, as it is handed to the process that runs vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from localizer.wire import ranks

SPEC_VARIABLE = "LOCALIZER_RUN"
"""Environment variable that holds the path of the specification file, inherited by every vLLM process."""

EVENTS_VARIABLE = "LOCALIZER_EVENTS"
"""Environment variable: the file descriptor on which the program reports, one JSON object a line."""

EXTENSION = "localizer.hooks.extension.LocalizerExtension"
"""The worker extension, named as a string so that nothing outside vLLM imports it."""

PROGRAM = "localizer.hooks.program"
"""The module that the source's interpreter runs."""

EXAMINE = "localizer.hooks.examine"
"""The module with which `localize doctor` examines an interpreter."""

SITE_KINDS = ("query", "key", "value", "output")
"""The sites of one attention layer at the host boundary, in execution order."""

LATENT_KINDS = ("query", "latent", "key_rope", "output")
"""Those of a layer with latent attention (MLA): what it writes are the latent and the rotated key part."""

STATE_SPACE_KINDS = ("projected_states", "output")
"""Those of a state-space layer (Mamba 2)."""

CHOICE_KINDS = ("router_logits", "expert_weights", "expert_ids")
EXPERT_KINDS = ("hidden_states", *CHOICE_KINDS, "shared_output", "output")
"""Those of a layer of experts (MoE); `CHOICE_KINDS` are of its router."""

RESIDUAL, AFTER_ATTENTION = "residual", "residual_after_attention"
"""Sites `<decoder layer>/...` of the residual stream: as the layer leaves it; between attention and MLP.
`<norm>/residual` is the stream as a norm that adds to it returns it."""

ROTATED = ("rotated_query", "rotated_key")
"""Sites `<rotary embedding>/...`. All other modules go by their own name, without a slash."""

UNREAD = "not read: "
"""What the reason begins with where the KV cache of a layer is not read."""

BOUNDARY, MODULE = LEVELS = ("boundary", "module")
"""What is tapped: the ops at the host boundary; or, without compilation, every module as well."""

INPUT_IDS, POSITIONS = "model/input_ids", "model/positions"
HIDDEN, LOGITS, TOKEN = "model/hidden_states", "lm_head/logits", "sampler/token"

AUXILIARY = "model/auxiliary_hidden_states"
"""Sites `AUXILIARY/0`, ... are the hidden states that the target's forward returns for an EAGLE3 draft."""

DRAFT = "draft:"
"""What the names of a draft's sites begin with."""

ALL_ROWS, LOGIT_ROWS, TOKEN_ROWS = "all", "logits", "tokens"
"""Which of the target's rows a site is expected on: all, those that feed logits, those that give a token."""

HOST, DEVICE = ROW_DIGESTS = ("host", "device")
"""Where rows are hashed: by localizer's writer; or on the GPU, those whose payload is not kept."""

DRAFT_ROWS, DRAFT_LOGIT_ROWS = "draft", "draft-logits"
"""Which of a draft's rows a site is expected on: all, or the one of each request that proposes a token."""


@dataclass(frozen=True)
class RunSpec:
    """What one source is asked to do and what is recorded of it.

    Attributes:
        model: model directory or hub name, as vLLM takes it.
        engine: keyword arguments of `vllm.LLM`, over the defaults of `localizer.hooks.program`.
        sampling: keyword arguments of `vllm.SamplingParams`.
        prompts: token ids of prompt i.
        rounds: for each round the requests' ids, index i being prompt i.
        layers: "all", "first", or indices such as "0,5-9" of the attention layers in execution order.
        sites: shell patterns; only sites that match one of them are recorded.
        level: one of `LEVELS`.
        payload: whose rows are kept, see `kept_sites`.
        row_digest: one of `ROW_DIGESTS`.
        digest_split: heads are recorded in the ranges that so many workers would hold.
        graph_rows: full CUDA graphs of more rows are not tapped; None taps all.
        graph_memory: bytes that the taps inside full graphs may take at most; None for what is left.
        weights: whether the loaded weights are hashed when the run is over.
        kv_contents: whether the keys and values of each step's requests are hashed after the step.
        probes: functions whose calls are counted, as `localizer.wire.probe` reads them.
        taps: False for an untapped run: only the returned tokens are kept.
        intervention: fields of `localizer.wire.phases.Intervention`; None where nothing is changed.
        rings: for each rank the path of its ring, opened by the worker.
        writer_pids: for each the process id of the consumer of its ring.
        parent_pid: process id of localize, with which every process of the run ends.
    """

    model: str
    engine: dict[str, Any]
    sampling: dict[str, Any]
    prompts: list[list[int]]
    rounds: list[list[str]]
    layers: str = "all"
    sites: list[str] = field(default_factory=lambda: ["*"])
    level: str = BOUNDARY
    payload: str = "first"
    row_digest: str = HOST
    digest_split: int = 1
    graph_rows: int | None = None
    graph_memory: int | None = None
    weights: bool = True
    kv_contents: bool = False
    probes: list[str] = field(default_factory=list)
    taps: bool = True
    intervention: dict[str, Any] | None = None
    rings: list[str] = field(default_factory=list)
    writer_pids: list[int] = field(default_factory=list)
    parent_pid: int = 0

    def write(self, path: Path) -> None:
        """Write the specification as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str | Path) -> RunSpec:
        """Read a specification written by `write`."""
        return cls(**json.loads(Path(path).read_text()))


def kept_sites(sites: Sequence[tuple[str, str]], choice: str) -> frozenset[str] | None:
    """Names of the sites whose rows are kept: all (None), those of the first tapped layer, or none.

    Sites that are announced later, those of modules, are kept only with all.

    Args:
        sites: name, and which rows, of those announced at first.
        choice: "all", "first" or "none".
    """
    if choice == "all":
        return None
    inputs = (INPUT_IDS, POSITIONS)
    names = [name for name, rows in sites if rows == ALL_ROWS and ranks.base(name) not in inputs]
    if choice == "none" or not names:
        return frozenset()
    layers = [ranks.base(name).rpartition("/")[0] for name in names]
    return frozenset(name for name, layer in zip(names, layers, strict=True) if layer == layers[0])


def parse_indices(text: str, count: int) -> list[int]:
    """Indices named by "all", "first" or a list such as "0,5-9", out of `count`.

    Raises:
        ValueError: the text is malformed or names an index that is not there; the message says which.
    """
    if text == "all":
        return list(range(count))
    if text == "first":
        return [0] if count else []
    chosen: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"{part.strip()!r} is neither an index nor a range such as 5-9")
        first, last = int(low), int(high) if dash else int(low)
        if first > last:
            raise ValueError(f"the range {part.strip()!r} runs backwards")
        if last >= count:
            raise ValueError(f"there is no layer {last} to tap; the model has {count}, numbered from 0")
        chosen.update(range(first, last + 1))
    return sorted(chosen)
