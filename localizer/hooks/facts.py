"""Facts of the running engine, as plain JSON values: what was resolved, loaded and allocated."""

from __future__ import annotations

import platform
from typing import Any

import torch

from localizer.hooks import layout
from localizer.hooks.boundaries import boundaries
from localizer.hooks.runner_v1 import raw_model
from localizer.wire import process


def config_facts(config: Any) -> dict[str, Any]:
    """What vLLM's resolved configuration says, with or without taps; absent attributes are null."""
    compilation, cache, scheduler = config.compilation_config, config.cache_config, config.scheduler_config
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_model_len": getattr(config.model_config, "max_model_len", None),
        "enforce_eager": getattr(config.model_config, "enforce_eager", None),
        "compilation_mode": _name(getattr(compilation, "mode", None)),
        "cudagraph_mode": _name(getattr(compilation, "cudagraph_mode", None)),
        "num_kv_blocks": getattr(cache, "num_gpu_blocks", None),
        "kv_block_size": getattr(cache, "block_size", None),
        "kv_cache_dtype": str(getattr(cache, "cache_dtype", None)),
        "prefix_caching": getattr(cache, "enable_prefix_caching", None),
        "max_num_seqs": getattr(scheduler, "max_num_seqs", None),
        "max_num_batched_tokens": getattr(scheduler, "max_num_batched_tokens", None),
        "chunked_prefill": getattr(scheduler, "enable_chunked_prefill", None),
        "async_scheduling": getattr(scheduler, "async_scheduling", None),
    }


def engine_facts(worker: Any) -> dict[str, Any]:
    """What one worker really loaded and allocated, beside its resolved configuration."""
    config, runner = worker.vllm_config, worker.model_runner
    model = raw_model(runner.model)
    found, _ = boundaries(config, model)
    backends = {
        item.name: f"{type(item.layer.impl).__module__}.{type(item.layer.impl).__qualname__}"
        for item in found
        if hasattr(item.layer, "impl")
    }
    return config_facts(config) | {
        "adapter": layout.adapter_facts(runner, versions()["vllm"]),
        "model_class": type(model).__name__,
        "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
        "attention_backends": backends,
        "device": str(getattr(runner, "device", None)),
        "processor": platform.machine(),
        "torch_threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    """Versions as the imported packages state them."""
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}


def resources(pid: int | None = None) -> dict[str, Any]:
    """What a process, this one by default, has used: bytes of resident memory at most, and seconds it lives.

    Raises:
        OSError: there is no such process.
    """
    return {"peak_memory": process.peak_memory(pid), "seconds": process.age(pid)}


def _name(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "name", value))
