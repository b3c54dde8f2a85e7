"""What `localize doctor` runs in an interpreter: really imports what a capture needs, and says how that went.

Each step appends two lines of JSON to the file named by the first argument, one before and one after it: a
crash or an import that never ends is then known by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

TORCH_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM asks for, text models do not need, and a wrong build of which breaks transformers."""


def python() -> dict[str, Any]:
    """The interpreter, and what it needs of the kernel."""
    os.close(os.pidfd_open(os.getpid()))
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "include": sysconfig.get_path("include"),
    }


def numpy() -> dict[str, Any]:
    """numpy, with which the observer hands over tensors."""
    return _version("numpy")


def torch() -> dict[str, Any]:
    """torch, and the GPUs that it sees."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [{"name": gpu.name, "memory": gpu.total_memory} for gpu in found],
    }


def extras() -> dict[str, Any]:
    """torchvision and its companions, where they are installed: which can be imported, and why not."""
    found: dict[str, str] = {}
    for name in TORCH_EXTRAS:
        if importlib.util.find_spec(name) is not None:
            try:
                importlib.import_module(name)
                found[name] = ""
            except Exception as error:
                found[name] = _reason(error)
    return {"errors": found}


def transformers() -> dict[str, Any]:
    """transformers, with the part that a broken torchvision breaks."""
    module = importlib.import_module("transformers")
    _ = module.PreTrainedModel  # it loads its parts only when they are asked for
    return {"version": str(module.__version__)}


def vllm() -> dict[str, Any]:
    """vLLM: version, the platform it chose, Triton, and what of it no adapter knows."""
    import vllm
    from vllm import LLM

    from localizer.hooks import layout

    layout.worker_class()
    return {
        "version": vllm.__version__,
        "location": os.path.dirname(os.path.abspath(vllm.__file__)),
        "platform": layout.platform(),
        "triton": bool(getattr(importlib.import_module("vllm.triton_utils"), "HAS_TRITON", False)),
        "memory_share": _memory_share(),
        "problems": [*layout.step_problems(), *layout.admission_problems(LLM)],
    }


STEPS: tuple[Callable[[], dict[str, Any]], ...] = (python, numpy, torch, extras, transformers, vllm)
"""In this order: what comes later needs what came before."""


def main(path: str) -> None:
    """Take all steps; a failed one does not keep the others from being taken."""
    with open(path, "a") as file:
        for step in STEPS:
            _tell(file, step=step.__name__)
            try:
                _tell(file, step=step.__name__, facts=step())
            except BaseException as error:  # whatever an import does, SystemExit included
                _tell(file, step=step.__name__, error=_reason(error))


def _tell(file: Any, **content: Any) -> None:
    print(json.dumps(content), file=file, flush=True)


def _version(name: str) -> dict[str, Any]:
    return {"version": str(importlib.import_module(name).__version__)}


def _memory_share() -> float | None:
    """The share of the memory that vLLM claims unless it is told otherwise."""
    try:
        config = importlib.import_module("vllm.config").CacheConfig
        return float(config().gpu_memory_utilization)
    except Exception:  # only a hint is lost
        return None


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")


if __name__ == "__main__":
    main(sys.argv[1])
