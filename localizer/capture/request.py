"""What is to be captured: the request as the person said it, checked and described before anything starts."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import localizer
from localizer.capture import graphtaps, unsupported
from localizer.capture.interventions import CHANGES, told
from localizer.errors import LocalizerError
from localizer.sources import interpreter, overlay
from localizer.sources.laid import lay_over
from localizer.store import names, schema, selection
from localizer.store.interventions import Intervention
from localizer.store.schema import NOT_RECORDED, Open
from localizer.wire import unsupported as refusals
from localizer.wire.probe import Probe
from localizer.wire.spec import BOUNDARY, DEVICE, HOST, MODULE, parse_indices
from localizer.workload import models, plan

BUFFER_MIB = 256
"""Default capacity of the ring between a worker and its writer, in MiB."""

RECORDED = (
    *("VLLM_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "NCCL_"),
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ATEN_", "CUBLAS_", "FLASHINFER_"),
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH"),
)
"""Prefixes of the environment variables that are recorded."""

SECRET = re.compile(
    r"(^|_)(\w*APIKEY|KEY|TOKEN|SECRET|\w*PASS|PASSWORD|\w*PASSWD|CREDENTIALS?)(_|\d|$)", re.IGNORECASE
)
"""Names of variables and engine arguments whose values stay out of captures, which are shown in public."""

MOST_LAYERS = 10_000
"""More attention layers than any model has; how many this one has is known when it is loaded."""

AROUND_TOKEN = 6
"""Bytes of a manifest around each returned token: indentation, comma, end of line."""

AROUND_LOGPROBS, LOGPROB = 13, 48
"""Bytes of a manifest around a token's logprobs, and of each of them beside the token id."""

HOOKS_MODULES = "worker: every module has forward hooks; a layer's residual stream is summed once more"
ON_A_GPU = (
    "on a GPU: rows are packed on the compute stream into two buffers, which a side stream copies to pinned "
    "memory; full CUDA graphs also copy the rows of tapped layers into buffers, allocated before capture"
)
HASHES_WEIGHTS = "loading: on the CPU, weights are hashed before vLLM packs them"
COUNTS = (
    "worker: metadata builders and override_forward_context of vllm.forward_context are wrapped and counted"
)
HASHES_ROWS = "on a GPU: rows whose payload is not kept are hashed there, by a Triton kernel"
READS_CACHE = "steps: after each forward the KV cache of the tapped layers is read and hashed"

COMPILE_CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}
"""Variables that name a place for compiled code -> its folder in `CaptureRequest.compile_cache`."""

SET = {"VLLM_NO_USAGE_STATS": "1", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
"""Environment variables given to every source unless the person sets them: no telemetry, no stray imports."""


@dataclass(frozen=True)
class CaptureRequest:
    """What to capture, as the person said it.

    Attributes:
        compile_cache: a place for the compiled code of this run; None for vLLM's usual ones.
        repeats: passes over the matrix; with an intervention, of one phase.
        graph_rows, graph_memory: limits of taps inside full CUDA graphs: rows of a graph, MiB of all.
        intervention: what is to be changed between phases; None for one phase.
        unchanged: whether an overlay may change nothing, as a commit that is bisected may.
    """

    name: str
    root: Path
    model: str
    python: str = sys.executable
    overlay: Path | None = None
    git: str = ""
    matrix: str = plan.MATRIX
    repeats: int = 2
    prompt_tokens: int = 16
    max_tokens: int = 64
    seed: int = 0
    layers: str = "all"
    level: str = BOUNDARY
    payload: str = "first"
    sites: Sequence[str] = ()
    rows: Sequence[str] = ()
    transactions: str = "all"
    engine: Mapping[str, Any] = field(default_factory=dict)
    speculative_model: str = ""
    speculative: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    taps: bool = True
    weights: bool = True
    kv_contents: bool = False
    row_digest: str = HOST
    digest_split: int = 1
    graph_rows: int | None = None
    graph_memory: int | None = None
    buffer: int = BUFFER_MIB
    logprobs: int | None = None
    compile_cache: Path | None = None
    unchanged: bool = False
    probes: Sequence[str] = ()
    intervention: Intervention | None = None


@dataclass(frozen=True)
class Prepared:
    """A checked request.

    Attributes:
        opening: the document open.json, but for the capture's number.
        executable: the source's interpreter.
        laid: the tree of the overlay or git revision, to be put first on PYTHONPATH.
        environment: variables that the source runs with, but for what localizer adds to PYTHONPATH.
        engine: engine arguments, secrets included.
        buffer: capacity of each ring, in bytes.
        intervention: as the source is told it, see `localizer.wire.spec.RunSpec`.
    """

    opening: Open
    executable: str
    laid: overlay.Laid | None
    environment: dict[str, str]
    engine: dict[str, Any]
    buffer: int
    intervention: dict[str, Any] | None = None


def masked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the values of secrets, in tables inside them as well; numbers are none."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return masked(value)
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return {
        key: plain(value)
        if value is None or isinstance(value, (int, float)) or not SECRET.search(key)
        else NOT_RECORDED
        for key, value in settings.items()
    }


def recorded_environment(
    environment: Mapping[str, str], given: Mapping[str, str], without: Container[str] = ()
) -> dict[str, str]:
    """The variables that choose what vLLM does, and those `given` by the person, without secrets."""
    return {
        key: NOT_RECORDED if SECRET.search(key) else value
        for key, value in sorted(environment.items())
        if (key.startswith(RECORDED) or key in given) and key not in without
    }


def compile_caches(request: CaptureRequest) -> dict[str, str]:
    """The variables that give a run a place of its own for compiled code; none unless it is asked for."""
    if request.compile_cache is None:
        return {}
    return {key: str(request.compile_cache / name) for key, name in COMPILE_CACHES.items()}


def prepare(request: CaptureRequest, say: models.Say = models.silent) -> Prepared:
    """Check the request and describe it, before anything is written; `say` hears what takes long.

    Raises:
        LocalizerError: the request is unusable; nothing was started.
    """
    names.check_name(request.name)
    repeats = request.repeats * (1 if request.intervention is None else len(request.intervention.phases))
    matrix = plan.parse_matrix(request.matrix, repeats)
    if min(request.repeats, request.prompt_tokens, request.max_tokens) < 1:
        raise LocalizerError("Repeats, prompt tokens and new tokens must be at least 1; check the numbers.")
    try:
        parse_indices(request.layers, MOST_LAYERS)
    except ValueError as error:
        raise LocalizerError(f"--layers {request.layers!r}: {error}; write first, all, or 0,5-9.") from None
    if request.level == MODULE and not request.engine.get("enforce_eager"):
        raise LocalizerError(
            "Modules can be tapped only without compilation; add --engine enforce_eager=true, or leave out "
            "--level module to capture what runs compiled at its host boundary."
        )
    requests = [name for names in schema.rounds(matrix, repeats) for name in names]
    try:
        selection.parse(request.rows, request.transactions, set(requests[: sum(matrix) * request.repeats]))
    except ValueError as error:
        raise LocalizerError(f"The selection cannot be used: {error}.") from None
    if "worker_extension_cls" in request.engine and request.taps:
        raise LocalizerError(
            "The observer is the worker extension; leave worker_extension_cls out of --engine."
        )
    check_probes(request)
    environment = {**SET, **os.environ, **request.environment, **compile_caches(request)}
    try:
        ranks = unsupported.ranks(request.engine) if request.taps else 1
    except ValueError as error:
        raise refused(str(error)) from None
    model = models.resolve(request.model, say)
    draft = models.resolve(request.speculative_model, say) if request.speculative_model else None
    for reason in unsupported.reasons(
        request.engine, plan.configuration(Path(model.path)), taps=request.taps, level=request.level
    ):
        raise refused(reason)
    engine = dict(request.engine) | speculation(request, draft)
    python = interpreter.probe(request.python, environment)
    check_row_digest(request, python)
    taps = graph_taps(request, model, draft, engine, python, say)
    laid, laid_over = lay_over(request.overlay, request.git, python, unchanged=request.unchanged, say=say)
    vocabulary = plan.vocabulary(Path(model.path))
    if len(requests) * request.max_tokens * token_bytes(vocabulary, request.logprobs) > schema.MAX_DOCUMENT:
        asked, fewer = (
            ("", "") if request.logprobs is None else (" with logprobs", ", or ask for fewer logprobs")
        )
        raise LocalizerError(
            f"{len(requests):,} requests of {request.max_tokens:,} tokens{asked} are more than a manifest "
            f"holds; capture fewer requests or fewer tokens{fewer}."
        )
    prompts = plan.draw_prompts(max(matrix), request.prompt_tokens, vocabulary, request.seed)
    opening = Open(
        format=schema.FORMAT,
        schema=schema.SCHEMA,
        name=request.name,
        number=0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        localizer=localizer.__version__,
        host={"name": platform.node(), "system": platform.platform(), "processor": platform.machine()},
        source=schema.Source(
            python=python.executable,
            python_version=python.python,
            vllm=python.vllm,
            vllm_location=str(python.vllm_location),
            torch=python.torch,
            overlay=laid_over,
            packages=python.packages,
        ),
        workload=schema.Workload(
            model=schema.Model(name=model.name, path=model.path, files=model.files),
            draft=None
            if draft is None
            else schema.Model(name=draft.name, path=draft.path, files=draft.files),
            matrix=matrix,
            repeats=repeats,
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            seed=request.seed,
            prompts=prompts,
            sampling=plan.greedy(request.max_tokens, request.logprobs),
            engine={key: NOT_RECORDED if SECRET.search(key) else value for key, value in engine.items()},
        ),
        environment=recorded_environment(environment, request.environment, set(compile_caches(request))),
        observer=schema.Observer(
            taps=request.taps,
            layers=request.layers,
            level=request.level,
            payload=request.payload if request.taps else "none",
            changes=observer_changes(request),
            sites=tuple(request.sites) or ("*",),
            rows=tuple(request.rows) or ("all",),
            transactions=request.transactions,
            weights=request.weights and request.taps,
            kv_contents=request.kv_contents and request.taps,
            row_digest=request.row_digest if request.taps else HOST,
            graph_rows=request.graph_rows if request.taps else None,
            graph_memory=request.graph_memory << 20 if request.graph_memory and request.taps else None,
            graph_taps=taps,
            probes=tuple(request.probes),
            digest_split=request.digest_split if request.taps else 1,
            ranks=ranks,
        ),
        intervention=request.intervention,
    )
    changes = None if request.intervention is None else told(request.intervention)
    return Prepared(opening, python.executable, laid, environment, engine, request.buffer << 20, changes)


def check_probes(request: CaptureRequest) -> None:
    """Check that probes can be read, whether or not there is what they name.

    Raises:
        LocalizerError: one cannot, or is named twice, or there are no taps to count with.
    """
    try:
        targets = [Probe.parse(text).target for text in request.probes]
    except ValueError as error:
        raise LocalizerError(f"--probe {error}; name what its module defines.") from None
    twice = [target for target in targets if targets.count(target) > 1]
    if twice:
        raise LocalizerError(f"--probe names {twice[0]} twice; name it once.")
    if targets and not request.taps:
        raise LocalizerError("Calls are counted by the observer; leave out --no-taps, or --probe.")


def refused(reason: str) -> LocalizerError:
    """What is said where a capture is refused: the reason as a sentence."""
    return LocalizerError(f"{reason[0].upper()}{reason[1:]}.")


def check_row_digest(request: CaptureRequest, python: interpreter.Interpreter) -> None:
    """Check that the source can hash rows on its device, as far as its packages tell; it checks again itself.

    Raises:
        LocalizerError: it cannot.
    """
    if request.row_digest == DEVICE and request.taps and request.digest_split > 1:
        raise refused(refusals.DIGEST_SPLIT_ON_DEVICE)
    if request.row_digest == DEVICE and request.taps and python.torch.endswith("+cpu"):
        raise refused(refusals.ROW_DIGEST_PLATFORM)


def graph_taps(
    request: CaptureRequest,
    model: models.ResolvedModel,
    draft: models.ResolvedModel | None,
    engine: Mapping[str, Any],
    python: interpreter.Interpreter,
    say: models.Say,
) -> schema.GraphTaps | None:
    """What taps inside full CUDA graphs will need on the device, said as far as it is known.

    Raises:
        LocalizerError: it is more than they may take.
    """
    if not request.taps or python.torch.endswith("+cpu"):
        return None
    found = graphtaps.estimate(
        plan.configuration(Path(model.path)),
        None if draft is None else plan.configuration(Path(draft.path)),
        engine,
        layers=request.layers,
        sites=request.sites,
        rows=request.graph_rows,
    )
    if found is not None:
        graphtaps.check(found, request.graph_memory)
        say(graphtaps.sentence(found))
    return found


def token_bytes(vocabulary: int, logprobs: int | None) -> int:
    """About how long a returned token is in a manifest, with its logprobs, in bytes."""
    digits = len(str(vocabulary // 2))
    if logprobs is None:
        return digits + AROUND_TOKEN
    several = vocabulary if logprobs < 0 else min(logprobs + 1, vocabulary)
    return digits + AROUND_TOKEN + AROUND_LOGPROBS + several * (digits + LOGPROB)


def speculation(request: CaptureRequest, draft: models.ResolvedModel | None) -> dict[str, Any]:
    """The engine argument `speculative_config`, if tokens are to be proposed: three at a time unless said.

    Raises:
        LocalizerError: it is given as an engine argument as well.
    """
    if draft is None and not request.speculative:
        return {}
    if "speculative_config" in request.engine:
        raise LocalizerError(
            "Speculation is set twice; use --speculative and --speculative-model, "
            "or --engine speculative_config=..., not both."
        )
    config: dict[str, Any] = {"num_speculative_tokens": 3, **request.speculative}
    if draft is not None:
        config["model"] = draft.path
        if draft.name == models.TINY_DRAFT:
            config.setdefault("method", "eagle3")
    return {"speculative_config": config}


def _model(model: models.ResolvedModel) -> schema.Model:
    return schema.Model(name=model.name, path=model.path, files=model.files)


def observer_changes(request: CaptureRequest) -> list[str]:
    """Everything that is not as in a run without localizer."""
    changes = [f"environment: {key}={value}" for key, value in SET.items() if key not in os.environ]
    changes += [
        "environment: PYTHONPATH begins with localizer's bridge",
        *(
            [f"environment: {', '.join(COMPILE_CACHES)} name a place for this arm alone"]
            if request.compile_cache is not None
            else []
        ),
        "engine: skip_tokenizer_init=True unless it is set",
        "admission: a round's requests are queued while the engine sleeps (level 0), then it wakes",
    ]
    if request.taps:
        changes += [
            "engine: worker_extension_cls names localizer's extension",
            "worker: the ops of tapped layers, compute_logits of the model and the methods of the runner by "
            "which steps are followed are wrapped; the model has forward hooks",
            ON_A_GPU,
            *([HOOKS_MODULES] if request.level == MODULE else []),
            *([HASHES_WEIGHTS] if request.weights else []),
            *([HASHES_ROWS] if request.row_digest == DEVICE else []),
            *([READS_CACHE] if request.kv_contents else []),
            COUNTS,
            *(
                f"worker: {Probe.parse(text).target} is wrapped and its calls are counted"
                for text in request.probes
            ),
            *([] if request.intervention is None else [CHANGES[request.intervention.kind]]),
            f"memory: a shared ring of at most {request.buffer} MiB, and a writer process"
            + (", for each worker" if request.engine.get("tensor_parallel_size", 1) != 1 else ""),
        ]
    return changes
