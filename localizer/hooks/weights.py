"""Digests of the weights as they are loaded: what a checkpoint, a quantisation or a loader made of them.

They are taken when the run is over. On the CPU vLLM packs some weights for its kernels as soon as it has
loaded them, and leaves nothing to read in their place: there they are hashed before that. Seen on vLLM 0.28.0
and 0.32.0: a loader calls `process_weights_after_loading(model, config, device)` by its module's own name.
"""

from __future__ import annotations

import functools
import importlib
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

import torch

from localizer.hooks.drafts import draft_model
from localizer.hooks.raw import raw_bytes
from localizer.hooks.runner_v1 import raw_model
from localizer.wire.spec import DRAFT

ALGORITHM = "blake2b-128"

CHUNK_BYTES = 64 << 20
"""So much of a tensor is copied at a time."""

MOST_THREADS = 8


LOADERS = "vllm.model_executor.model_loader.base_loader"
PROCESS = "process_weights_after_loading"

_before_packing: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()


def arrange() -> None:
    """Make loaders on the CPU hash a model's weights before they are packed; does nothing elsewhere."""
    try:
        module = importlib.import_module(LOADERS)
        process = getattr(module, PROCESS)
    except (ImportError, AttributeError):
        return  # weights that were packed are then told without a digest
    if hasattr(process, "__wrapped__"):
        return

    @functools.wraps(process)
    def hashed(model: Any, config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if torch.device(device).type == "cpu":
                _before_packing[model] = dict(_digests(list(tensors(model))))
        except Exception:  # the run must not change
            _before_packing.pop(model, None)
        return process(model, config, device, *args, **kwargs)

    setattr(module, PROCESS, hashed)


def tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter and buffer."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def digest(tensor: torch.Tensor) -> str:
    """The digest of a tensor, hex: of its dtype, its shape and its elements in C order.

    A part at a time is copied to the host.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    found = blake2b(f"{dtype} {list(tensor.shape)}\n".encode(), digest_size=16)
    whole = tensor.detach()
    whole = whole.reshape(1) if whole.dim() == 0 else whole
    row = max(whole[:1].numel() * whole.element_size(), 1)
    for part in whole.split(max(CHUNK_BYTES // row, 1)):
        if part.numel():
            found.update(raw_bytes(part))
    return found.hexdigest()


def _digests(named: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str]]:
    """(name, digest) of tensors; the threads do not hold up each other: hashing releases the interpreter."""
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        digests = pool.map(digest, (tensor for _, tensor in named))
        yield from zip((name for name, _ in named), digests, strict=True)


def weight_facts(runner: Any) -> dict[str, Any]:
    """The digest of each parameter and buffer, a draft's with `draft:` before its name, and one over all.

    What a draft shares with the target is told with the target alone. A digest is empty where nothing is left
    to read.
    """
    seen: set[int] = set()
    found: dict[str, str] = {}
    for prefix, model in (("", raw_model(runner.model)), (DRAFT, draft_model(runner))):
        if model is not None:
            packed = _before_packing.get(model, {})
            named = [(name, tensor) for name, tensor in tensors(model) if id(tensor) not in seen]
            seen |= {id(tensor) for _, tensor in named}
            found |= {prefix + name: packed.get(name, "") for name, tensor in named if not tensor.numel()}
            there = [(name, tensor) for name, tensor in named if tensor.numel()]
            found |= {prefix + name: hexes for name, hexes in _digests(there)}
    total = blake2b(digest_size=16)
    for name, hexes in sorted(found.items()):
        total.update(f"{name} {hexes}\n".encode())
    return {"algorithm": ALGORITHM, "digest": total.hexdigest(), "tensors": dict(sorted(found.items()))}
