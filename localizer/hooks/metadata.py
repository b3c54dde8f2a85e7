"""Reading attention metadata: how many rows each request of a batch has in the forward that is about to run.

Seen on vLLM 0.28.0 and 0.32.0. `forward_context.attn_metadata` is a table by layer; a list of such tables,
one for each micro-batch (dual-batch overlap), with `forward_context.ubatch_slices` beside it; one object for
all layers (older versions); or None (a profiling run).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any


def row_counts(context: Any, layer: str) -> list[int]:
    """Rows of each request, in batch order, as the metadata of one attention layer tells them.

    A micro-batch has the rows from its slice's offset on, so that a request may begin in one and go on in the
    next: its rows are added up.

    Args:
        context: vLLM's forward context.
        layer: name of the layer.

    Raises:
        RuntimeError: the metadata does not tell.
    """
    metadata = context.attn_metadata
    if not isinstance(metadata, list):
        return _counts(_of(metadata, layer), layer)
    slices = getattr(context, "ubatch_slices", None)
    if slices is None or len(slices) != len(metadata):
        raise RuntimeError(f"the metadata of {layer} is in micro-batches whose slices are not known")
    total: list[int] = []
    rows = 0
    for part, where in zip(metadata, slices, strict=True):
        if where.token_slice.start != rows:
            raise RuntimeError(f"a micro-batch starts at row {where.token_slice.start} instead of {rows}")
        for request, count in enumerate(_counts(_of(part, layer), layer), where.request_slice.start):
            total += [0] * (request + 1 - len(total))
            total[request] += count
            rows += count
    return total


def _of(metadata: Any, layer: str) -> Any:
    """A layer's metadata out of a table, or the object for all layers."""
    return metadata.get(layer) if isinstance(metadata, dict) else metadata


def _counts(metadata: Any, layer: str) -> list[int]:
    starts = getattr(metadata, "query_start_loc", None)
    if starts is None:
        raise RuntimeError(f"the metadata of {layer} does not tell the rows of each request")
    return [end - start for start, end in pairwise(starts.tolist())]
