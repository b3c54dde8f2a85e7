"""The JSON documents of a capture and the columns of its tables, as typed records."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from localizer.errors import DamagedCapture, LocalizerError
from localizer.store import strict
from localizer.store.digest import ALGORITHMS, XXH3
from localizer.store.dtypes import NUMPY
from localizer.store.interventions import Course, Intervention
from localizer.store.tensors import is_shape
from localizer.store.types import (
    LEAST,
    MAX_ITEMS,
    Count,
    Few,
    Integer,
    IntegerTable,
    Positive,
    Texts,
    TextTable,
    TokenId,
)
from localizer.wire.ranks import MOST_RANKS

FORMAT = "localizer-capture"
SCHEMA = 1
DIGEST_BYTES = 16

OPEN, JOURNAL, MANIFEST, LOG = "open.json", "journal.jsonl", "manifest.json", "log.txt"

MOST_DRAFT_STEPS = 64
"""Draft steps of a proposal that row kinds can name."""

KINDS = (
    *("prefill", "prefill-chunk", "decode", "verify-accepted", "verify-rejected", "draft-padding"),
    *(f"draft-{step}" for step in range(1, MOST_DRAFT_STEPS + 1)),
)
"""Row kinds by their code in the row table."""

PREFILL, PREFILL_CHUNK, DECODE, VERIFY_ACCEPTED, VERIFY_REJECTED, DRAFT_PADDING = range(6)
"""Codes of row kinds, below `DRAFT_PADDING` the target's; `DRAFT_PADDING` + k is that of draft step k."""

PLAIN, FEEDS_LOGITS, DECIDES_TOKEN = 0, 1, 2
"""Values of the column `logits`: no logits; logits computed; logits computed and a token taken from them."""

UNFINISHED = ("", "abort", "error")
"""Finish reasons after which tokens are missing for want of time, not because the source chose others."""

COLUMNS: dict[str, np.dtype] = {
    "request": np.dtype(np.int32),
    "position": np.dtype(np.int32),
    "token": np.dtype(np.int64),
    "occurrence": np.dtype(np.int32),
    "step": np.dtype(np.int32),
    "kind": np.dtype(np.uint8),
    "logits": np.dtype(np.uint8),
    "sampled": np.dtype(np.int64),
}
"""The integer columns of the row table, each [rows]; `prefix` is uint8 [rows, 16] beside them."""

ROW_INDEX = "#rows"
"""Suffix of the payload tensor that holds which rows (within the set) were kept of a site."""

MAX_REQUESTS = 100_000
"""Most requests of a capture: one that is read may not ask for any amount of memory."""

MAX_DOCUMENT = 32 << 20
"""Longest JSON document, in bytes: taken apart it needs some 25 times as much memory."""

MAX_DEPTH, MAX_FLAT = 20, 16 << 20
"""Of a table of settings: how deep it is nested; how long its dotted names are together, in characters."""

MAX_POSITION = (1 << 24) - 1
"""The last position of a row."""

COMPLETE, INCOMPLETE = "complete", "incomplete"
"""States of a capture."""

NOT_RECORDED = "(not recorded)"
"""Stands for the value of a secret."""

GPU_SLACK = 64 << 20
"""So many bytes more in use on a GPU than before a run are not told: the driver's own use varies."""

MAX_NAME = 500
"""Longest name of a site."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: immutable, keyword only; unknown keys are ignored: newer files stay readable."""


class Site(Record, frozen=True, kw_only=True):
    """One observed place in the forward pass.

    Attributes:
        name: e.g. `model.layers.0.self_attn.attn/query`.
        rows: the rows it exists on: "all", "logits" (those that feed the logits) or "tokens" (those from
            which a token was taken); elsewhere it is not applicable.
        dtype: torch's name of the dtype; empty until the first row was seen.
        shape: shape of one row, e.g. [heads, head_dim]; None until the first row was seen.
        digest: the algorithm of its digests, one of `localizer.store.digest.ALGORITHMS`.
    """

    name: str
    rows: Literal["all", "logits", "tokens", "draft", "draft-logits"]
    dtype: str = ""
    shape: tuple[Count, ...] | None = None
    digest: str = XXH3

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME or not self.name.isprintable():
            raise ValueError(f"{self.name[:40]!r} cannot name a site")
        if self.shape is not None and not is_shape(list(self.shape)):
            raise ValueError(f"no row can have {len(self.shape)} dimensions of such sizes")
        if self.dtype and self.dtype not in NUMPY:
            raise ValueError(f"unknown dtype {self.dtype[:40]!r}")
        if self.digest not in ALGORITHMS:
            raise ValueError(f"unknown row digest {self.digest[:40]!r}")


class Shard(Record, frozen=True, kw_only=True):
    """A finished file: name relative to the capture, size in bytes, xxh3-128 in hex."""

    name: str
    size: Count
    xxh3_128: str


Against = Literal["installed", "uncommitted", "folder", "unknown"]


class Native(Record, frozen=True, kw_only=True):
    """Compiled code that a source changes and that was not rebuilt: it has no effect.

    Attributes:
        against: how the files were found: they differ from the "installed" vLLM's commit; they have
            "uncommitted" changes, as that commit is not in the checkout; all that there are in the "folder",
            which is no checkout; or "unknown", as nothing could be compared.
        base: the commit or tag of the installed vLLM, found or looked for.
        files: the first of them by name, path from the root; `count` is how many there are.
    """

    against: Against
    base: str = ""
    files: Texts
    count: Count


class Revision(Record, frozen=True, kw_only=True):
    """A git revision: folder of the repository, the revision as it was typed, and the commit it named."""

    repository: str
    revision: str
    commit: str


class Overlay(Record, frozen=True, kw_only=True):
    """Files that stood in for those of the installed vLLM: path below `vllm/` -> xxh3-128 in hex.

    `git` is where they are from, if not from a folder of the person's; `native` is what was not rebuilt.
    """

    path: str
    files: TextTable
    git: Revision | None = None
    native: Native | None = None


class Source(Record, frozen=True, kw_only=True):
    """One runnable vLLM."""

    python: str
    python_version: str
    vllm: str
    vllm_location: str
    torch: str
    overlay: Overlay | None = None
    packages: TextTable = {}


class Model(Record, frozen=True, kw_only=True):
    """The model as the workload names it; `files` maps a file of a local model to its xxh3-128 in hex."""

    name: str
    path: str
    files: TextTable = {}


class HiddenPrompt(Record, frozen=True, kw_only=True):
    """A prompt without token ids: the keyed prefixes of its positions, 16 bytes each, in base64.

    Its length is that of the prompt; two of them are equal if the prompts are.
    """

    prefixes: str

    def __post_init__(self) -> None:
        try:
            size = len(base64.b64decode(self.prefixes, validate=True))
        except (binascii.Error, ValueError):
            raise ValueError("a hidden prompt is not base64") from None
        if size % DIGEST_BYTES:
            raise ValueError("a hidden prompt does not hold whole prefixes")

    def __len__(self) -> int:
        return (len(self.prefixes) // 4 * 3 - self.prefixes[-2:].count("=")) // DIGEST_BYTES

    def table(self) -> np.ndarray:
        """uint8 [tokens, 16]: the prefixes."""
        blob = base64.b64decode(self.prefixes, validate=True)
        return np.frombuffer(blob, np.uint8).reshape(-1, DIGEST_BYTES)


Prompt = list[TokenId] | HiddenPrompt


class Workload(Record, frozen=True, kw_only=True):
    """What the source is asked to do.

    `prompts[i]` is prompt i; request `rRR.II` is prompt II of round RR. `draft` is what proposes tokens.
    """

    model: Model
    draft: Model | None = None
    matrix: Annotated[list[Positive], msgspec.Meta(max_length=MAX_REQUESTS)]
    repeats: Positive
    prompt_tokens: Count
    max_tokens: Count
    seed: Integer
    prompts: Annotated[Sequence[Prompt], msgspec.Meta(max_length=MAX_REQUESTS)]
    sampling: dict[str, Any]
    engine: dict[str, Any]

    def __post_init__(self) -> None:
        if sum(self.matrix) * self.repeats > MAX_REQUESTS:
            raise ValueError(f"more than {MAX_REQUESTS} requests")
        if len(self.prompts) < max(self.matrix, default=0):
            raise ValueError("a request has no prompt")
        check_settings(self.sampling)
        check_settings(self.engine)


class GraphTaps(Record, frozen=True, kw_only=True):
    """Buffers on the device for taps inside full CUDA graphs: for graphs of so many rows; bytes of all."""

    rows: Count
    bytes: Count


class Observer(Record, frozen=True, kw_only=True):
    """What was recorded, and everything the observer changes in a run.

    Attributes:
        graph_rows, graph_memory: limits of taps inside full graphs, rows and bytes; None without one.
        graph_taps: what they were expected to need; None where there are none, or that was not known.
        digest_split: heads were recorded in the ranges that so many workers would hold.
        ranks: workers that were recorded, each in its folder `rank-N`.
    """

    taps: bool
    layers: str
    payload: str
    changes: Texts
    level: str = "boundary"
    sites: Annotated[tuple[str, ...], Few] = ("*",)
    rows: Annotated[tuple[str, ...], Few] = ("all",)
    transactions: str = "all"
    weights: bool = True
    kv_contents: bool = False
    row_digest: str = "host"
    graph_rows: Count | None = None
    graph_memory: Count | None = None
    graph_taps: GraphTaps | None = None
    probes: Annotated[tuple[str, ...], Few] = ()
    digest_split: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] = 1
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] = 1


class Reduced(Record, frozen=True, kw_only=True):
    """That a capture is a part of another one, and what was taken away.

    Attributes:
        of: label of the original.
        manifest: SHA-256 in hex of the original's manifest.json; empty where it had none.
        left_out: what was taken away, a sentence each.
        key: names the secret key with which prefixes and digests were replaced; empty where none was. Only
            captures of one key can be compared.
    """

    of: str
    manifest: str
    left_out: Texts
    key: str = ""


class Open(Record, frozen=True, kw_only=True):
    """open.json: everything that is known before the engine starts.

    `intervention` is None unless the workload is done in phases, which `workload.repeats` then counts in;
    `reduced` is None unless this is a part of a capture.
    """

    format: str
    schema: Integer
    name: str
    number: Count
    created: str
    localizer: str
    host: TextTable
    source: Source
    workload: Workload
    environment: TextTable
    observer: Observer
    intervention: Intervention | None = None
    reduced: Reduced | None = None

    def __post_init__(self) -> None:
        done = self.intervention
        if done is not None and len(done.phases) * done.repeats != self.workload.repeats:
            raise ValueError("its phases do not make up its passes")


LogProbability = float | Literal["-inf", "inf", "nan"]
"""A logarithm as vLLM returned it; JSON has no word for one that is not finite."""


class Output(Record, frozen=True, kw_only=True):
    """What vLLM returned for one request; nothing, if it was aborted: no tokens, and `finish` says so.

    `logprobs[i]` has (token id, logprob) of the most likely tokens at the place of `tokens[i]` and of that
    token itself, by rank; it is empty where no logprobs were asked for.
    """

    request: str
    internal: str
    external: str
    tokens: list[TokenId]
    finish: str
    cached_tokens: Count
    logprobs: list[list[tuple[TokenId, LogProbability]]] = []


class Probe(Record, frozen=True, kw_only=True):
    """Calls of a function that the person named, over all workers.

    Attributes:
        target: `module:Class.method` or `module:function`.
        cache: name of the attribute whose length tells hits; empty without.
        calls: in recorded steps; `calls_outside_steps`: all others, as of warm-up.
        hits: those of `calls` that returned while the cache had not grown; None where that is not known.
    """

    target: str
    cache: str = ""
    calls: Count
    hits: Count | None = None
    calls_outside_steps: Count


class Coverage(Record, frozen=True, kw_only=True):
    """Rows of one site that the steps should have given, and rows that were recorded."""

    expected: Count
    recorded: Count


class Weights(Record, frozen=True, kw_only=True):
    """The weights as they were loaded: digests in hex of every parameter and buffer, and one over all.

    `tensors` maps a name, with `draft:` before it for a draft's own, to the digest of its elements.
    """

    algorithm: str
    digest: str
    tensors: TextTable


class Compiled(Record, frozen=True, kw_only=True):
    """How the model was compiled.

    Attributes:
        mode, backend: as vLLM resolved them.
        cache: "empty" (vLLM's compile cache held nothing), "hit" (all came from it), "miss" or "disabled".
        counters: vLLM's own counts of graphs seen, compiled, loaded and captured; those that are not 0.
        files: generated code that was loaded: name below the cache folder -> xxh3-128 in hex.
    """

    mode: str
    backend: str
    cache: str
    counters: IntegerTable
    files: TextTable


class Imported(Record, frozen=True, kw_only=True):
    """The Python files of vLLM that were imported: how many, one digest over all, those not as installed."""

    files: Count
    digest: str
    changed: Texts


class Processor(Record, frozen=True, kw_only=True):
    """Model, and flags and torch's instruction set, by which kernels are chosen; torch's threads."""

    model: str
    flags: Texts
    capability: str
    threads: Count


class Gpu(Record, frozen=True, kw_only=True):
    """A GPU that a worker used.

    Attributes:
        driver: version of its driver.
        cuda: version of CUDA that torch was built for.
        capability: compute capability, such as `9.0`.
    """

    name: str
    uuid: str
    driver: str
    cuda: str = ""
    capability: str = ""


class GpuMemory(Record, frozen=True, kw_only=True):
    """Bytes in use on a GPU of the machine, by whatever program, before a run and after it."""

    uuid: str
    before: Count
    after: Count

    @property
    def left(self) -> int:
        """Bytes more than before; 0 where that is too little to be told."""
        more = self.after - self.before
        return more if more > GPU_SLACK else 0


class Checkout(Record, frozen=True, kw_only=True):
    """The git checkout of a source; `dirty` is None where git did not say in time."""

    commit: str
    dirty: bool | None


class Identity(Record, frozen=True, kw_only=True):
    """What really ran.

    Attributes:
        native: native libraries that the source's processes had mapped: name below the package's folder,
            such as `torch/lib/libtorch_cpu.so` -> xxh3-128 in hex, empty where it could not be read.
        python: the Python files of vLLM that were imported.
        processor, gpus: what it ran on.
        checkout: of the overlay, or of vLLM itself, if it lies in one.
    """

    native: TextTable
    python: Imported
    processor: Processor | None = None
    gpus: Annotated[list[Gpu], Few] = []
    checkout: Checkout | None = None


class Manifest(Record, frozen=True, kw_only=True):
    """manifest.json: written last; its presence marks a run that ended by itself.

    Attributes:
        state: "complete", or "incomplete" with `reasons`.
        sites: in execution order.
        not_applicable: sites that the model does not have, with the reason.
        untapped: attention-like layers that no tap knows, with their class.
        code: where in vLLM's source the tensor of a site passes, where that is known.
        files: every file of the capture but this one.
        counts: steps, rows, dummy forwards dropped, and the like.
        engine: facts of the running engine: resolved configuration, backends, KV blocks.
        durations: seconds by phase, and for each process how long it lived.
        round_seconds: of each round that ended, from its first step to its last output.
        left_shared_memory: what the run left in /dev/shm, by name: that it was removed, or why not.
        gpu_memory: what was in use on each GPU of the machine before the run and after it.
        weights, compiled, identity: what was loaded, compiled and run; None where it was not recorded.
        config: the whole resolved configuration, by section.
        kv_contents: by tapped layer which layout of its KV cache was read, or why none was.
        probes: calls of the functions that the person named, in the order of `Observer.probes`.
        intervention: how the phases went; None where there are none.
    """

    format: str
    schema: Integer
    state: Literal["complete", "incomplete"]
    reasons: Texts
    outputs: list[Output]
    sites: Annotated[list[Site], Few]
    coverage: Annotated[dict[str, Coverage], Few]
    not_applicable: TextTable
    untapped: TextTable = {}
    code: TextTable = {}
    counts: IntegerTable
    engine: dict[str, Any]
    durations: Annotated[dict[str, float], Few]
    peak_memory_bytes: IntegerTable
    files: list[Shard]
    weights: Weights | None = None
    compiled: Compiled | None = None
    identity: Identity | None = None
    config: dict[str, Any] = {}
    kv_contents: TextTable = {}
    left_shared_memory: TextTable = {}
    gpu_memory: Annotated[list[GpuMemory], Few] = []
    round_seconds: Annotated[list[float], Few] = []
    probes: Annotated[list[Probe], Few] = []
    intervention: Course | None = None

    def __post_init__(self) -> None:
        check_settings(self.engine)
        check_settings(self.config)


Document = TypeVar("Document", Open, Manifest)
T = TypeVar("T")

_LONGEST_REASON = 300


def token_ids(prompt: Prompt) -> list[int]:
    """The token ids of a prompt.

    Raises:
        LocalizerError: they were taken away.
    """
    if isinstance(prompt, HiddenPrompt):
        raise LocalizerError("The prompts of this capture were taken away; use the capture it was made from.")
    return prompt


def check_settings(table: dict[str, Any]) -> None:
    """Check that a table of any keys and values can be flattened and printed.

    Raises:
        ValueError: it is too deep or too large, or holds an integer of more than 64 bits.
    """
    count, total = 0, 0
    level: list[tuple[int, Any]] = [(0, table)]
    for _ in range(MAX_DEPTH):
        below: list[tuple[int, Any]] = []
        for length, value in level:
            total += length
            count += len(value) if isinstance(value, (dict, list, tuple)) else 0
            if count > MAX_ITEMS or total > MAX_FLAT:
                raise ValueError("it holds too many settings")
            if isinstance(value, dict):
                below += [(length + len(str(key)) + 1, item) for key, item in value.items()]
            elif isinstance(value, (list, tuple)):
                below += [(0, item) for item in value]
            elif isinstance(value, int) and not LEAST <= value < 1 << 64:
                raise ValueError("it holds an integer of more than 64 bits")
        level = below
    if level:
        raise ValueError(f"its settings are nested more than {MAX_DEPTH} levels deep")


def encode(record: Record) -> bytes:
    """A record as indented JSON without a trailing newline: a file cut anywhere is no longer valid JSON.

    Raises:
        LocalizerError: no reader would read so long a document.
    """
    blob = msgspec.json.format(msgspec.json.encode(record), indent=1)
    if len(blob) > MAX_DOCUMENT:
        raise LocalizerError(
            f"The records of this capture are longer than {MAX_DOCUMENT >> 20} MiB; "
            "capture fewer requests or fewer tokens."
        )
    return blob


def decode(path: Path, kind: type[Document]) -> Document:
    """Read a document and check its types, format and schema version.

    Raises:
        DamagedCapture: the file is not what it should be; the message says where.
    """
    try:
        document = parse(read(path), kind)
    except ValueError as error:
        raise DamagedCapture(f"{path} is damaged ({error}); fetch or make the capture again.") from None
    if document.format != FORMAT:
        raise DamagedCapture(f"{path} is not a localizer capture (its format is {document.format[:40]!r}).")
    if document.schema != SCHEMA:
        raise DamagedCapture(
            f"{path} has schema {document.schema}, this localizer reads schema {SCHEMA}; "
            "use the localizer version that made it."
        )
    return document


def read(path: Path) -> bytes:
    """The contents of a document.

    Raises:
        DamagedCapture: it is not a plain file, is larger than any document, or cannot be read.
    """
    if path.is_symlink() or not path.is_file():
        raise DamagedCapture(f"{path} is missing or not a plain file; fetch or make the capture again.")
    try:
        with path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            blob = handle.read(min(size, MAX_DOCUMENT) + 1)  # it makes room for as much as is asked for
    except OSError as error:
        raise DamagedCapture(
            f"{path} cannot be read ({error.strerror}); fetch or make the capture again."
        ) from None
    if len(blob) > MAX_DOCUMENT:
        raise DamagedCapture(
            f"{path} is larger than {MAX_DOCUMENT >> 20} MiB; fetch or make the capture again."
        )
    return blob


def parse(blob: bytes, kind: type[T]) -> T:
    """The record that a JSON text holds, checked for its types.

    Raises:
        ValueError: it is not such a record; the message says why in one sentence of printable characters.
    """
    strict.loads(blob)  # first, and forgotten: msgspec takes the last of equal keys
    try:
        return msgspec.json.decode(blob, type=kind)
    except msgspec.DecodeError as error:
        text = str(error)
        raise ValueError(text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}...") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def request_name(round_index: int, prompt_index: int) -> str:
    """The id of a request: `rRR.II`."""
    return f"r{round_index:02d}.{prompt_index:02d}"


def rounds(matrix: list[int], repeats: int) -> list[list[str]]:
    """Request ids of each round: `matrix` batch sizes, `repeats` passes over it."""
    return [
        [request_name(number, index) for index in range(size)] for number, size in enumerate(matrix * repeats)
    ]
