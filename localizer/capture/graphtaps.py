"""What the taps inside full CUDA graphs will need on the device, as config.json and the arguments tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localizer.errors import LocalizerError
from localizer.store.schema import GraphTaps
from localizer.wire.ranks import matches
from localizer.wire.spec import DRAFT, HIDDEN, LOGITS, SITE_KINDS, parse_indices

MOST_ROWS = 512
"""Rows of the greatest graph that vLLM captures unless told otherwise; 1024 on Blackwell (vLLM 0.32)."""

WITHOUT = ("NONE", "PIECEWISE")
"""Graph modes without full graphs."""

OTHER_LAYERS = (
    *("kv_lora_rank", "layers_block_type", "hybrid_override_pattern"),
    *("ssm_state_size", "state_size"),
)
"""Keys of models whose layers are not all alike, or are no plain attention."""


def estimate(
    config: Mapping[str, Any],
    draft: Mapping[str, Any] | None,
    engine: Mapping[str, Any],
    *,
    layers: str,
    sites: Sequence[str],
    rows: int | None,
) -> GraphTaps | None:
    """Rows and bytes of the buffers, of each worker; None where there are none, or config.json does not tell.

    Args:
        config: the model's config.json.
        draft: that of the draft model; None without one.
        engine: engine arguments.
        layers: as `--layers` names them.
        sites: shell patterns; empty for all.
        rows: the rows up to which graphs are tapped; None for all of them.
    """
    greatest = greatest_graph(engine)
    if not greatest:
        return None
    count = greatest if rows is None else min(greatest, rows)
    size = _element_size(engine)
    ranks = _number(engine.get("tensor_parallel_size")) or 1
    total = _layers(config, "", layers, sites, ranks)
    if total is None:
        return None
    taken = total * count
    if draft is not None:
        of_draft = _layers(draft, DRAFT, "all", sites, ranks)
        if of_draft is None:
            return None
        requests = min(count, _number(engine.get("max_num_seqs")) or count)
        vocabulary = _number(draft.get("draft_vocab_size")) or _number(draft.get("vocab_size"))
        ends = _wanted(DRAFT + HIDDEN, sites) * _number(draft.get("hidden_size"))
        ends += _wanted(DRAFT + LOGITS, sites) * vocabulary
        taken += of_draft * count + ends * requests
    return GraphTaps(rows=count, bytes=taken * size) if taken else None


def sentence(taps: GraphTaps) -> str:
    """What is said before the engine starts."""
    return f"taps inside full CUDA graphs of up to {taps.rows} rows will need {_mib(taps)} on the device"


def check(taps: GraphTaps, limit: int | None) -> None:
    """Check that the buffers are no more than `limit` MiB; None is no limit.

    Raises:
        LocalizerError: they are.
    """
    if limit is not None and taps.bytes > limit << 20:
        raise LocalizerError(
            f"Taps inside full CUDA graphs of up to {taps.rows} rows need {_mib(taps)} on the device, more "
            f"than --graph-memory {limit}; tap fewer --layers or --sites, or lower --graph-rows."
        )


def _mib(taps: GraphTaps) -> str:
    return f"about {-(-taps.bytes // (1 << 20))} MiB"


def greatest_graph(engine: Mapping[str, Any]) -> int:
    """Rows of the greatest full graph that will be captured; 0 where there are none."""
    compilation = engine.get("compilation_config")
    compilation = compilation if isinstance(compilation, Mapping) else {}
    mode = str(compilation.get("cudagraph_mode") or "").upper()
    if engine.get("enforce_eager") or mode in WITHOUT:
        return 0
    for given in (engine, compilation):
        sizes = given.get("cudagraph_capture_sizes")
        if isinstance(sizes, Sequence) and not isinstance(sizes, str):
            return max(map(_number, sizes), default=0)
        if most := _number(given.get("max_cudagraph_capture_size")):
            return most
    return MOST_ROWS


def _layers(
    config: Mapping[str, Any], prefix: str, layers: str, sites: Sequence[str], ranks: int
) -> int | None:
    """Elements of a row at all wanted sites of the chosen layers, of one of so many ranks.

    None where that is not known.
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) else config
    number, heads = (_number(config.get(key)) for key in ("num_hidden_layers", "num_attention_heads"))
    if not number or not heads or any(config.get(key) for key in OTHER_LAYERS):
        return None
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and not all(str(kind).endswith("_attention") for kind in kinds):
        return None
    dim = _number(config.get("head_dim")) or _number(config.get("hidden_size")) // heads
    groups = _number(config.get("num_key_value_heads")) or heads
    heads, groups = -(-heads // ranks), max(1, groups // ranks)
    widths = dict(zip(SITE_KINDS, (heads * dim, groups * dim, groups * dim, heads * dim), strict=True))
    try:
        chosen = parse_indices(layers, number)
    except ValueError:  # the worker says so when it has the layers
        chosen = list(range(number))
    return sum(
        width
        for layer in chosen
        for kind, width in widths.items()
        if _wanted(f"{prefix}model.layers.{layer}.self_attn.attn/{kind}", sites)
    )


def _wanted(name: str, sites: Sequence[str]) -> bool:
    return not sites or any(matches(name, pattern) for pattern in sites)


def _element_size(engine: Mapping[str, Any]) -> int:
    """Bytes of an element: vLLM takes two unless it is asked for float32."""
    return 4 if engine.get("dtype") in ("float32", "float") else 2


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
