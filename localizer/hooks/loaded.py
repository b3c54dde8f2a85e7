"""What this process has really loaded and runs on: native libraries, files of vLLM, processor and GPU."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import torch

PACKAGES = ("vllm", "torch", "nvidia", "triton", "flash_attn", "flashinfer")
"""Packages whose native libraries choose or hold kernels."""

FLAGS = re.compile(r"avx\w*|amx\w*|fma|f16c|sse4_\d|asimd\w*|sve\w*|bf16|i8mm")
"""Flags of a processor by which kernels are chosen."""


def loaded_facts() -> dict[str, Any]:
    """Native libraries and Python files of this process: name below its package's folder -> path."""
    return {"native": native_libraries(), "python": python_files()}


def mapped_files() -> list[str]:
    """Paths of the files that are mapped into this process."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line}
    return sorted(path for path in paths if path.startswith("/") and not path.endswith(" (deleted)"))


def native_libraries() -> dict[str, str]:
    """Mapped shared libraries of `PACKAGES`: name such as `torch/lib/libtorch_cpu.so` -> path."""
    import vllm

    places = [*sys.path, os.path.dirname(os.path.dirname(os.path.realpath(vllm.__file__)))]
    places = sorted({os.path.realpath(place) for place in places if place}, key=len, reverse=True)
    found = {}
    for path in mapped_files():
        if ".so" in os.path.basename(path):
            below = [os.path.relpath(path, place) for place in places if path.startswith(place + os.sep)]
            if below and below[0].split(os.sep)[0].partition(".")[0] in PACKAGES:
                found[below[0]] = path
    return found


def python_files() -> dict[str, str]:
    """Files of the imported modules of vLLM: name such as `vllm/config/model.py` -> path."""
    import vllm

    above = os.path.dirname(os.path.dirname(os.path.abspath(vllm.__file__)))
    found = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name.partition(".")[0] == "vllm" and isinstance(path, str) and path.endswith(".py"):
            found[os.path.relpath(path, above)] = path
    return dict(sorted(found.items()))


def hardware_facts() -> dict[str, Any]:
    """The processor with the flags that choose kernels, torch's threads, and the GPU of this worker."""
    return {"processor": processor(), "gpus": gpus()}


def processor() -> dict[str, Any]:
    """Model and flags as Linux tells them, the instruction set that torch uses, and its threads."""
    table: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                table.setdefault(key.strip(), value.strip())
    except OSError:
        pass  # what is not told stays empty
    flags = table.get("flags", table.get("Features", "")).split()
    return {
        "model": table.get("model name", ""),
        "flags": sorted(flag for flag in flags if FLAGS.fullmatch(flag)),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def gpus() -> list[dict[str, str]]:
    """The GPU that this worker uses, if it uses one."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return [
        {
            "name": str(found.name),
            "uuid": str(getattr(found, "uuid", "")),
            "driver": driver(),
            "cuda": str(torch.version.cuda or ""),
            "capability": f"{found.major}.{found.minor}",
        }
    ]


def driver(path: str = "/proc/driver/nvidia/version") -> str:
    """Version of the NVIDIA driver; empty where there is none."""
    try:
        with open(path) as lines:
            known = re.search(r"\s(\d+\.[\d.]+)\s", lines.read())
    except OSError:
        return ""
    return known[1] if known else ""
