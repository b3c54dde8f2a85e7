"""What a capture ran on, in a line of Markdown: versions, model, runner, graphs, attention, hardware.

Each value is one code span, whatever it is; the words around are ours.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from localizer.report.counts import count
from localizer.report.gfm import code
from localizer.report.safe import clean
from localizer.store.reader import Capture

BACKENDS_SHOWN = 3
WIDEST = 80
"""Characters of a name that are shown."""


def environment(capture: Capture) -> str:
    """The line, without a full stop, in which nothing is live; what the capture does not say is left out."""
    engine = capture.manifest.engine if capture.manifest is not None else {}
    source, work = capture.open.source, capture.open.workload
    parts = [
        f"vLLM {_text(source.vllm) or 'unknown'}",
        f"torch {_text(source.torch)}" if source.torch else "",
        f"Python {_text(source.python_version)}" if source.python_version else "",
        f"model {_text(work.model.name)}",
        f"draft {_text(work.draft.name)}" if work.draft is not None else "",
        _runner(engine),
        _graphs(engine),
        _backends(engine.get("attention_backends")),
        f"dtype {_text(engine['dtype'])}" if engine.get("dtype") else "",
        f"KV cache {_text(engine['kv_cache_dtype'])}" if engine.get("kv_cache_dtype") else "",
        _hardware(capture, engine),
    ]
    return "; ".join(filter(None, parts))


def _text(value: Any) -> str:
    return code(clean(str(value), WIDEST))


def _runner(engine: dict[str, Any]) -> str:
    adapter = engine.get("adapter")
    if isinstance(adapter, dict) and adapter.get("runner"):
        return f"model runner {_text(str(adapter['runner']).upper())}"
    return f"runner {_text(engine['runner'])}" if engine.get("runner") else ""


def _graphs(engine: dict[str, Any]) -> str:
    eager, mode = engine.get("enforce_eager"), engine.get("cudagraph_mode")
    graphs = f"CUDA graphs {_text(mode)}" if mode is not None else ""
    if eager is None:
        return graphs
    compiled = "eager" if eager else f"compiled ({_text(engine.get('compilation_mode', 'mode not known'))})"
    return f"{compiled}, {graphs}" if graphs else compiled


def _backends(by_layer: Any) -> str:
    if not isinstance(by_layer, dict) or not by_layer:
        return ""
    found = Counter(str(name).rpartition(".")[2] for name in by_layer.values()).most_common()
    shown = [f"{_text(name)} in {count(number, 'layer')}" for name, number in found[:BACKENDS_SHOWN]]
    more = [f"{len(found) - BACKENDS_SHOWN} more"] if len(found) > BACKENDS_SHOWN else []
    return f"attention {', '.join([*shown, *more])}"


def _hardware(capture: Capture, engine: dict[str, Any]) -> str:
    identity = capture.manifest.identity if capture.manifest is not None else None
    gpus = identity.gpus if identity is not None else []
    if gpus:
        return "GPU " + ", ".join(
            f"{_text(gpu.name)} (driver {_text(gpu.driver) or 'unknown'})" for gpu in gpus[:2]
        )
    if identity is not None and identity.processor is not None:
        processor = identity.processor
        return f"CPU {_text(processor.model) or 'unknown'} ({_text(processor.capability)})"
    device = engine.get("device")
    kind = engine.get("processor") or capture.open.host.get("processor", "")
    return f"device {_text(device)}{f' ({_text(kind)})' if kind else ''}" if device else ""
