"""What one worker of several holds of each site, as the loaded layers and the configuration tell it.

Seen on vLLM 0.32.0 (CPU): `parallel_config.rank` is set by the worker; an `Attention` layer has the numbers
of heads of this rank, the model's configuration those of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localizer.hooks.boundaries import Boundary
from localizer.hooks.layout import CannotTap
from localizer.wire import unsupported
from localizer.wire.ranks import Naming, share
from localizer.wire.spec import DRAFT, LOGITS, TOKEN

GATHERED = "vLLM gathers the logits on another rank"

Held = tuple[int, int, bool] | None


def naming(config: Any, target: Sequence[Boundary], draft: Sequence[Boundary], split: int = 1) -> Naming:
    """How the sites of this worker are called, of the target and of its draft.

    With `split` the sites of heads are recorded in the ranges that so many workers would hold.

    Raises:
        CannotTap: so many workers could not share the heads of a layer.
    """
    parallel = getattr(config, "parallel_config", None)
    ranks = getattr(parallel, "tensor_parallel_size", 1)
    if ranks == split == 1:
        return Naming()
    rank = getattr(parallel, "rank", 0) % ranks
    speculative = getattr(config, "speculative_config", None)
    model, draft_model = config.model_config, getattr(speculative, "draft_model_config", None)
    draft_ranks = getattr(getattr(speculative, "draft_parallel_config", None), "tensor_parallel_size", ranks)
    heads: dict[str, Held] = {}
    for layer in target:
        heads.update(_layer(layer, "", model, rank, ranks, ranks))
    for layer in draft:
        heads.update(_layer(layer, DRAFT, draft_model, rank, ranks, draft_ranks))
    ranges: dict[str, int] = {}
    for layers, prefix, whole in ((target, "", model), (draft, DRAFT, draft_model)) if split > 1 else ():
        for layer in layers:
            ranges.update(_ranges(layer, prefix, whole, heads, split))
    return Naming(rank, ranks, heads, ranges)


def gathered_elsewhere(model: Any, naming: Naming) -> dict[str, str]:
    """Sites that this worker does not have because another one gathers the logits, with the reason."""
    if naming.rank and any(getattr(module, "use_all_gather", True) is False for module in model.modules()):
        return dict.fromkeys((LOGITS, TOKEN), GATHERED)
    return {}


def _layer(
    layer: Boundary, prefix: str, model: Any, rank: int, ranks: int, split: int
) -> Iterator[tuple[str, Held]]:
    """The sites of a layer whose heads are split over `split` ranks: over all, or a draft's over one."""
    queries, pairs = _totals(model)
    for part in (*layer.parts, *layer.absent):
        total = pairs if part in ("key", "value") else queries
        mine = _mine(layer.layer, "num_kv_heads" if part in ("key", "value") else "num_heads")
        fits = layer.heads and total is not None and mine == max(1, total // split)
        yield f"{prefix}{layer.name}/{part}", share(total or 0, mine, rank, ranks) if fits else None


def _ranges(
    layer: Boundary, prefix: str, model: Any, heads: Mapping[str, Held], split: int
) -> Iterator[tuple[str, int]]:
    """The sites of a layer of heads, and into how many ranges they are divided for `split` workers."""
    queries, pairs = _totals(model)
    for part in layer.parts if layer.heads else ():
        site = f"{prefix}{layer.name}/{part}"
        total = (pairs if part in ("key", "value") else queries) or 0
        held, wanted = heads.get(site), share(total, max(1, total // split), 0, split)
        if held is None or wanted is None or wanted[1] % held[1]:
            raise CannotTap(unsupported.DIGEST_SPLIT.format(site=site, heads=total or "unknown", split=split))
        if wanted[1] > held[1]:
            yield site, wanted[1]


def _mine(layer: Any, name: str) -> int:
    """How many heads a layer has on this rank; 0 where it does not say."""
    found = getattr(layer, name, None) or getattr(getattr(layer, "impl", None), name, None)
    return found if isinstance(found, int) else 0


def _totals(model: Any) -> tuple[int | None, int | None]:
    """The numbers of query heads, and of key and value heads, of a whole model; None where it has no one."""
    text = getattr(model, "hf_text_config", None)
    queries = getattr(text, "num_attention_heads", None)
    count = getattr(model, "get_total_num_kv_heads", None)
    pairs = count() if callable(count) else None
    return (
        queries if isinstance(queries, int) else None,
        pairs if isinstance(pairs, int) else None,
    )
