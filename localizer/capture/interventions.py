"""From what a person wants to change between phases to an intervention that is checked and described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from localizer.errors import LocalizerError
from localizer.store.interventions import Intervention, Patch
from localizer.store.tensors import file_digest
from localizer.wire import phases
from localizer.wire.phases import ATTENTION_BACKEND, PATCH, PREFIX_CACHE, phase_names

CHANGES = {
    PATCH: "intervention: in phase B functions are replaced in every worker, and their calls counted",
    PREFIX_CACHE: "intervention: the prefix cache is reset before phase B",
    ATTENTION_BACKEND: "intervention: phase B has new attention metadata builders, whose calls are counted",
}
"""What the observer adds to a run for an intervention of each kind."""


def intervention(
    patches: Sequence[str], phase: str | None, repeats: int, *, everywhere: bool, keep_prefix_cache: bool
) -> Intervention:
    """The intervention that options describe.

    Args:
        patches: `module:attr=file.py:name` each.
        phase: a kind that changes no code, or None.
        repeats: passes over the matrix in one phase.
        everywhere: whether other names of what is patched are changed as well.
        keep_prefix_cache: whether the prefix cache is left as it is between phases.

    Raises:
        LocalizerError: the options are malformed or do not fit together.
    """
    if bool(patches) == bool(phase):
        raise LocalizerError(
            "Say what is to be changed in phase B: either --patch module:attr=file.py:name, or --phase."
        )
    if everywhere and not patches:
        raise LocalizerError("--patch-everywhere belongs to --patch; leave it out or name a patch.")
    if keep_prefix_cache and phase == PREFIX_CACHE:
        raise LocalizerError("--phase prefix-cache resets the prefix cache; leave out --keep-prefix-cache.")
    kind = phase or PATCH
    found = [parse_patch(text) for text in patches]
    targets = [patch.target for patch in found]
    for target in targets:
        if targets.count(target) > 1:
            raise LocalizerError(f"{target} is patched twice; name it once.")
    return Intervention(
        kind=kind,  # type: ignore[arg-type]  # the record checks it when it is read
        phases=phase_names(kind),
        repeats=repeats,
        patches=found,
        everywhere=everywhere,
        keep_prefix_cache=keep_prefix_cache,
    )


def parse_patch(text: str) -> Patch:
    """A replacement from `module:attr=file.py:name`.

    Raises:
        LocalizerError: it is not of that form, or the file cannot be read.
    """
    target, _, replacement = text.partition("=")
    module, colon, attribute = target.partition(":")
    path, other_colon, name = replacement.rpartition(":")
    parts = [*module.split("."), *attribute.split("."), name]
    if not (colon and other_colon and path) or not all(part.isidentifier() for part in parts):
        raise LocalizerError(
            f"--patch {text!r} is not module:attr=file.py:name; write for example "
            "--patch vllm.model_executor.models.llama:LlamaMLP.forward=change.py:forward."
        )
    file = Path(path).resolve()
    try:
        digest = file_digest(file)
    except OSError as error:
        raise LocalizerError(f"--patch {text!r}: {path} cannot be read ({error.strerror}).") from None
    return Patch(target=target, path=str(file), name=name, xxh3_128=digest)


def told(wanted: Intervention) -> dict[str, Any]:
    """The intervention as the source is told it."""
    return asdict(
        phases.Intervention(
            kind=wanted.kind,
            patches=[[patch.target, patch.path, patch.name] for patch in wanted.patches],
            everywhere=wanted.everywhere,
            keep_prefix_cache=wanted.keep_prefix_cache,
        )
    )
