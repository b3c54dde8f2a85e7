"""`localize demo`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from localizer.cli.options import captures_root
from localizer.errors import LocalizerError
from localizer.sources.fault import in_layer, plant
from localizer.sources.interpreter import probe
from localizer.workload.tiny import LAYERS

WORKLOAD = (
    *("--model", "tiny", "--matrix", "1,2,4", "--repeats", "2", "--max-tokens", "16"),
    *("--engine", "enforce_eager=true", "--engine", "kv_cache_memory_bytes=268435456"),
    *("--env", "VLLM_ENABLE_V1_MULTIPROCESSING=0"),
)
"""14 requests that keep the tour short: no compilation, a small KV cache, the engine in one process."""


@click.command("demo")
@click.option(
    "--layer",
    type=click.IntRange(0, LAYERS - 1),
    default=4,
    show_default=True,
    help="The layer of the tiny model in which the fault is planted.",
)
@click.option("--eagle3", is_flag=True, help="Let an EAGLE3 draft propose tokens in both captures.")
@captures_root
def command(layer: int, eagle3: bool, root: Path) -> int:
    """Plant a fault in a real vLLM and find it: a tour.

    Captures the installed vLLM (demo-parent), then the same with one changed line (demo-candidate), and
    compares the two. Exit codes: 0 the fault was found where it was planted, 2 it was not or an error.
    """
    overlay = root / "demo-overlay"
    python = probe(sys.executable, dict(os.environ))
    fault = in_layer(layer)
    changed = plant(overlay, python.vllm_location, fault)
    workload = [*WORKLOAD, *(("--speculative-model", "tiny-eagle3") if eagle3 else ())]
    tell(f"The parent is the installed vLLM {python.vllm}. The model is a tiny Llama built from a seed.")
    run("capture", "demo-parent", *workload, *_out(root))
    tell(
        f"The candidate is the same vLLM with one more line in {changed},\n"
        f"after the MLP of a decoder layer (here: layer {layer}):\n\n    {fault.line}"
    )
    run("capture", "demo-candidate", *workload, "--overlay", str(overlay), *_out(root))
    tell("Now the question: which code is it?")
    run("diff", "demo-candidate", "demo-parent", *_out(root))
    return conclude(root, layer)


def tell(text: str) -> None:
    """A paragraph of the tour."""
    click.echo(f"\n{text}\n")


def run(*arguments: str) -> None:
    """Show a command, then carry out exactly that command."""
    from localizer.cli.main import localize

    click.echo(click.style(f"$ localize {shlex.join(arguments)}", bold=True))
    localize.main(list(arguments), prog_name="localize", standalone_mode=False)


def conclude(root: Path, layer: int) -> int:
    """Say whether the diff named the planted place; the exit code."""
    from localizer.diff.pipeline import diff
    from localizer.store.names import load

    first = diff(load(root, "demo-candidate"), load(root, "demo-parent")).first
    last = layer == LAYERS - 1
    expected = "model/hidden_states" if last else f"model.layers.{layer + 1}.self_attn.attn/query"
    if first is None or first.site != expected:
        found = "nothing" if first is None else first.site
        raise LocalizerError(
            f"The fault was planted before {expected}, but the diff named {found}; please report this."
        )
    tell(
        f"Planted after the MLP of layer {layer}; named: the code before {expected}. Found.\n\n"
        "For a change of your own:\n"
        "  localize capture parent --model MODEL\n"
        "  localize capture candidate --model MODEL --overlay CHECKOUT\n"
        "  localize diff candidate parent"
    )
    return 0


def _out(root: Path) -> list[str]:
    return [] if root == Path("captures") else ["--out", str(root)]
