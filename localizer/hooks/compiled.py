"""The identity of compiled code: how it was compiled, from which cache, which generated files were loaded.

Seen on vLLM 0.32.0 (CPU). vLLM counts what it compiles and loads in `compilation_counter`; the files lie in
`compilation_config.local_cache_dir`, and inductor's in its `inductor_cache`. That folder outlives runs, so
only files that this process has mapped or imported are this run's.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from localizer.hooks.loaded import mapped_files

LOADED = ("num_aot_artifacts_loaded", "num_compiled_artifacts_loaded")
COMPILED = ("num_aot_compiles", "num_compiled_artifacts_saved", "num_inductor_compiles", "num_eager_compiles")
"""vLLM's counters of code that came from its cache, and of code that was compiled."""

SOURCES = (".cpp", ".cu", ".py")
"""Endings of the generated text from which a library with the same stem was built."""

EMPTY, HIT, MISS, DISABLED = "empty", "hit", "miss", "disabled"


def cache_is_empty() -> bool:
    """Whether vLLM's compile cache holds nothing yet; to be asked before a model is loaded."""
    import vllm.envs as envs

    try:
        return not any(os.scandir(os.path.join(envs.VLLM_CACHE_ROOT, "torch_compile_cache")))
    except (OSError, AttributeError):
        return True


def compile_facts(config: Any, was_empty: bool) -> dict[str, Any] | None:
    """What was compiled, with `files` as name -> path of the generated code; None if nothing was.

    Args:
        config: vLLM's resolved configuration.
        was_empty: whether vLLM's cache was empty when the run began.
    """
    compilation = config.compilation_config
    mode = getattr(compilation, "mode", None)
    if not mode:  # 0 is CompilationMode.NONE
        return None
    from vllm.compilation.counter import compilation_counter

    counters = {name: int(count) for name, count in vars(compilation_counter).items() if count}
    return {
        "mode": str(getattr(mode, "name", mode)),
        "backend": str(getattr(compilation, "backend", "")),
        "cache": _cache(counters, was_empty),
        "counters": counters,
        "files": generated_files(getattr(compilation, "local_cache_dir", None) or ""),
    }


def _cache(counters: dict[str, int], was_empty: bool) -> str:
    import vllm.envs as envs

    if getattr(envs, "VLLM_DISABLE_COMPILE_CACHE", False):
        return DISABLED
    if was_empty:
        return EMPTY
    loaded, compiled = (any(counters.get(name) for name in names) for names in (LOADED, COMPILED))
    return HIT if loaded and not compiled else MISS


def generated_files(folder: str) -> dict[str, str]:
    """Generated code that this process has loaded: name below its cache folder -> path.

    Args:
        folder: vLLM's cache folder for this configuration; empty if it has none.
    """
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    roots = [os.path.realpath(root) for root in (folder, inductor) if root]
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    loaded = [*mapped_files(), *(path for path in modules if isinstance(path, str))]
    found: dict[str, str] = {}
    for path in loaded:
        path = os.path.realpath(path)
        for root in roots:
            if path.startswith(root + os.sep):
                text = _source(path)
                found.setdefault(os.path.relpath(text, root), text)
                break
    for root in roots[:1]:
        for place, _, names in os.walk(root):
            for name in names:
                if name in ("computation_graph.py", "transformed_code.py"):
                    path = os.path.join(place, name)
                    found[os.path.relpath(path, root)] = path
    return dict(sorted(found.items()))


def _source(path: str) -> str:
    """The generated text behind a loaded file."""
    stem, ending = os.path.splitext(path)
    texts = [stem + source for source in SOURCES if ending == ".so" and os.path.isfile(stem + source)]
    return texts[0] if texts else path
