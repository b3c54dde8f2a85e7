"""localize.toml: the sources, their work, what is recorded, and how far to go (docs/run.md)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from localizer.errors import LocalizerError
from localizer.run.lines import line_of
from localizer.wire.spec import BOUNDARY, HOST
from localizer.workload import plan

FILE = "localize.toml"

OWN, SHARED, NONE = "own", "shared", "none"
"""Every arm compiles for itself; all take what vLLM's usual compile cache holds; none compiles."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Sizes = Annotated[list[Positive], msgspec.Meta(min_length=1)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the sections: a key that is not known is an error."""


class Workload(_Section, frozen=True, kw_only=True):
    """What both sources are asked to do, as the options of `localize capture` say it."""

    model: str
    matrix: Sizes = msgspec.field(default_factory=lambda: plan.parse_matrix(plan.MATRIX, 1))
    repeats: Positive = 2
    prompt_tokens: Positive = 16
    max_tokens: Positive = 64
    seed: Count = 0
    speculative_model: str = ""
    speculative: dict[str, Any] = {}


class Source(_Section, frozen=True, kw_only=True):
    """One vLLM, and what only it is given.

    Attributes:
        python: path or name of its interpreter; empty for localizer's own.
        overlay: folder with a `vllm/` tree, relative to the configuration's folder.
        git: `REPO@REV`, whose `vllm/` tree is laid over in the same way; REPO is relative to that folder.
        probes: functions whose calls are counted in the runs with taps, as `localize capture --probe` says.
        engine, environment: beside, or instead of, what both sources are given.
    """

    python: str = ""
    overlay: str = ""
    git: str = ""
    probes: list[str] = []
    engine: dict[str, Any] = {}
    environment: dict[str, str] = {}


class Selection(_Section, frozen=True, kw_only=True):
    """What the first pass records: digests of all rows at the sites chosen here."""

    layers: str = "all"
    level: Literal["boundary", "module"] = BOUNDARY  # type: ignore[assignment]
    sites: list[str] = []
    payload: Literal["none", "first", "all"] = "none"
    weights: bool = True
    kv_contents: bool = False
    row_digest: Literal["host", "device"] = HOST  # type: ignore[assignment]
    graph_rows: Count = 0
    graph_memory: Count = 0


class Passes(_Section, frozen=True, kw_only=True):
    """How often what is run.

    Attributes:
        untapped: runs of each source without taps; two of them say whether it is reproducible.
        controls: further runs of the parent with taps.
        repeats: further runs of the candidate with taps.
        witness_tries: how often the witness pass is tried; 0 leaves it out.
        logprobs: how many log probabilities a token are asked of all runs alike; 0 for none.
        compile_cache: "own" or "shared"; it does not matter in eager mode.
    """

    untapped: Count = 2
    controls: Count = 1
    repeats: Count = 1
    witness_tries: Count = 3
    logprobs: Count = 2
    compile_cache: Literal["own", "shared"] = OWN  # type: ignore[assignment]


class Config(_Section, frozen=True, kw_only=True):
    """The whole of localize.toml."""

    workload: Workload
    candidate: Source = Source()
    parent: Source = Source()
    engine: dict[str, Any] = {}
    environment: dict[str, str] = {}
    selection: Selection = Selection()
    run: Passes = Passes()


def load(path: Path, overrides: Sequence[tuple[str, Any]] = ()) -> Config:
    """Read a configuration.

    Args:
        path: the file.
        overrides: (dotted name, value) that stand in for what the file says, e.g. `workload.model`.

    Raises:
        LocalizerError: it cannot be read, is no TOML, or holds something unknown or of a wrong type; the
            sentence names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise LocalizerError(f"{path} is not UTF-8 text; write it anew with localize init.") from None
    except OSError as error:
        raise LocalizerError(
            f"{path} cannot be read ({error.strerror}); write one with localize init."
        ) from None
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise LocalizerError(f"{path} is not TOML that can be used: {error}.") from None
    for name, value in overrides:
        _put(tree, name, value)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise LocalizerError(_complaint(path, text, str(error), dict(overrides))) from None


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *sections, key = name.split(".")
    for section in sections:
        below = tree.setdefault(section, {})
        if not isinstance(below, dict):
            return  # what is wrong with it is said when the tree is checked
        tree = below
    tree[key] = value


def _complaint(path: Path, text: str, error: str, overrides: dict[str, Any]) -> str:
    """What is wrong, with the line on which it stands."""
    what, _, where = error.partition(" - at `$")
    names = re.findall(r"\.([^.`]+)", re.sub(r"\[[^]]*\]", "", where))
    if unknown := re.search(r"unknown field `(.*)`", what):
        names.append(unknown[1])
        what = f"unknown key {'.'.join(names)}"
    elif missing := re.search(r"missing required field `(.*)`", what):
        what = f"the key {'.'.join([*names, missing[1]])} is missing"
    else:
        what = f"{'.'.join(names)}: {what[0].lower()}{what[1:]}"
    dotted = ".".join(names)
    if any(dotted == name or dotted.startswith(f"{name}.") for name in overrides):
        return f"The option for {dotted} cannot be used: {what.partition(': ')[2] or what}."
    line = line_of(text, names) if names else None
    place = f"{path}, line {line}" if line is not None else f"{path}"
    return f"{place}: {what}; docs/run.md lists what may stand there."


TEMPLATE = """\
# What `localize run` does: both sources, the same work, the noise, and the first place that differs.
# Every key that is commented out stands at its default. docs/run.md explains them.

[workload]
model = "tiny"                        # a path, a hub name, or one of `localize models`
# matrix = [1, 2, 4, 8, 4, 2, 1]      # batch sizes, one round each
# repeats = 2                         # passes over the matrix
# prompt_tokens = 16
# max_tokens = 64
# seed = 0                            # of the prompts
# speculative_model = ""              # a draft, e.g. "tiny-eagle3"
# speculative = {}                    # keys of vLLM's speculative_config

[parent]                              # the vLLM that is taken as right
# python = ""                         # its interpreter; localizer's own unless said
# overlay = ""                        # a folder with a vllm/ tree, laid over the installed vLLM
# git = ""                            # or "REPO@REV": the vllm/ tree of a git revision
# probes = []                         # functions whose calls are counted, as "module:Class.method"
# engine = {}                         # engine arguments of this source alone
# environment = {}                    # environment variables of this source alone

[candidate]                           # the vLLM that was changed
overlay = "overlay"                   # a checkout, or a folder with only the changed files
# git = ""
# python = ""
# probes = []
# engine = {}
# environment = {}

[engine]                              # arguments of vllm.LLM for both sources
# enforce_eager = true
# kv_cache_memory_bytes = 268435456   # the same number of KV blocks on both sides

[environment]                         # environment variables of both sources

[selection]                           # what is recorded: digests of every row at these sites
# layers = "all"                      # "first", or indices such as "0,5-9"
# level = "boundary"                  # "module" takes every module, in eager mode
# sites = []                          # shell patterns; all sites unless said
# payload = "none"                    # whose rows are kept whole in the first pass: none, first, all
# weights = true                      # hash the loaded weights
# kv_contents = false                 # hash the KV cache after every step
# row_digest = "host"                 # "device" hashes rows on a CUDA GPU
# graph_rows = 0                      # tap full CUDA graphs of up to so many rows; 0: all
# graph_memory = 0                    # MiB that these taps may take; 0: what is free

[run]
# untapped = 2                        # runs of each source without taps: is it reproducible, are taps neutral
# controls = 1                        # further runs of the parent: what differs without any change?
# repeats = 1                         # further runs of the candidate
# witness_tries = 3                   # captures, with payload, of what leads to the first difference
# logprobs = 2                        # log probabilities asked of every run, to see more than tokens; 0: none
# compile_cache = "own"               # every arm compiles for itself; "shared" trusts vLLM's cache
"""
"""The commented file that `localize init` writes."""
