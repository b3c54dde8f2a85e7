"""Planting a known fault: an overlay of the installed vLLM in which one line is added to one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localizer.errors import LocalizerError

MODELS = Path("vllm/model_executor/models")
MLP = "        hidden_states = self.mlp(hidden_states)\n"
FACTOR = 1.0078125
"""1 + 2**-7: one unit in the last place of a bfloat16 significand."""


@dataclass(frozen=True)
class Fault:
    """A line that is added after another, which stands once in the file; the path is below the overlay."""

    file: Path
    after: str
    line: str


def in_layer(layer: int, factor: float = FACTOR) -> Fault:
    """Scale the MLP output of one decoder layer of a Llama."""
    chosen = f'self.self_attn.attn.layer_name == "model.layers.{layer}.self_attn.attn"'
    line = f"hidden_states = hidden_states * {factor} if {chosen} else hidden_states"
    return Fault(MODELS / "llama.py", MLP, line)


def in_draft(factor: float = FACTOR) -> Fault:
    """Scale the MLP output of the layer of an EAGLE3 draft."""
    return Fault(MODELS / "llama_eagle3.py", MLP, f"hidden_states = hidden_states * {factor}")


def plant(overlay: Path, installed: Path, fault: Fault) -> Path:
    """Write a copy of an installed file with the fault into `overlay`; return the changed file.

    Args:
        overlay: folder that becomes the overlay; made if need be.
        installed: the folder of the installed `vllm` package.
        fault: what is added where.

    Raises:
        LocalizerError: the installed file has no single place for the fault.
    """
    original = installed.parent / fault.file
    text = original.read_text()
    if text.count(fault.after) != 1:
        raise LocalizerError(f"{original} is not arranged as in vLLM 0.28.0 to 0.32.0; no fault was planted.")
    changed = overlay / fault.file
    changed.parent.mkdir(parents=True, exist_ok=True)
    indent = fault.after[: len(fault.after) - len(fault.after.lstrip())]
    changed.write_text(text.replace(fault.after, f"{fault.after}{indent}{fault.line}\n"))
    return changed
