"""Planting a known fault: an overlay of the installed vLLM in which one layer's MLP output is scaled."""

from __future__ import annotations

from pathlib import Path

from localizer.errors import LocalizerError

FILE = Path("vllm/model_executor/models/llama.py")
LINE = "        hidden_states = self.mlp(hidden_states)\n"
FACTOR = 1.0078125
"""1 + 2**-7: one unit in the last place of a bfloat16 significand."""


def plant(overlay: Path, installed: Path, layer: int, factor: float = FACTOR) -> tuple[Path, str]:
    """Write into `overlay` a copy of the installed llama.py that scales the MLP output of one decoder layer.

    Args:
        overlay: folder that becomes the overlay; made if need be.
        installed: the folder of the installed `vllm` package.
        layer: index of the decoder layer.
        factor: what the output is multiplied with.

    Returns:
        The changed file and the line that was added.

    Raises:
        LocalizerError: the installed file has no single place for the fault.
    """
    text = (installed.parent / FILE).read_text()
    if text.count(LINE) != 1:
        raise LocalizerError(
            f"{installed.parent / FILE} is not arranged as in vLLM 0.28.0 to 0.32.0; no fault planted."
        )
    is_layer = f'self.self_attn.attn.layer_name == "model.layers.{layer}.self_attn.attn"'
    added = f"hidden_states = hidden_states * {factor} if {is_layer} else hidden_states"
    changed = overlay / FILE
    changed.parent.mkdir(parents=True, exist_ok=True)
    changed.write_text(text.replace(LINE, f"{LINE}        {added}\n"))
    return changed, added
