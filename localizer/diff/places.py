"""What a site's name says: its layer, its part, and the group of sites that are computed side by side."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from localizer.wire.spec import (
    AFTER_ATTENTION,
    AUXILIARY,
    CHOICE_KINDS,
    DRAFT,
    EXPERT_KINDS,
    HIDDEN,
    INPUT_IDS,
    LATENT_KINDS,
    LOGITS,
    POSITIONS,
    RESIDUAL,
    ROTATED,
    SITE_KINDS,
    STATE_SPACE_KINDS,
    TOKEN,
)

INPUTS, QKV, ROUTING, OUTPUT, MODULE, INSIDE, FINAL, LM_HEAD, SAMPLER, OTHER = (
    "inputs", "qkv", "routing", "output", "module", "auxiliary", "hidden", "logits", "token", "other",
)  # fmt: skip
"""The stage of a forward pass that a site ends. `QKV` is what an op of a layer takes in (queries, keys and
values, or what stands in their place), `ROUTING` the experts chosen, `OUTPUT` what the op gives. `INSIDE`
ends none: it is computed between two layers, which are not known, and seen only when the forward returns."""

ATTENTION, STATE_SPACE, EXPERTS = "attention", "state-space", "experts"
"""What the op of a layer computes."""

_OUTPUTS = ("output", "shared_output")
_KINDS = {
    LATENT_KINDS: ATTENTION,
    STATE_SPACE_KINDS: STATE_SPACE,
    EXPERT_KINDS: EXPERTS,
    SITE_KINDS: ATTENTION,
}
_OPS = {part: op for kinds, op in _KINDS.items() for part in kinds if part not in _OUTPUTS}
_ROUTING = CHOICE_KINDS[1:]
_MODULE_PARTS = (RESIDUAL, AFTER_ATTENTION, *ROTATED)

NUMBER = re.compile(r"[0-9]{1,4}")
"""The layer's number within its name; longer ones are not trusted to be one."""

_STAGES = {INPUT_IDS: INPUTS, POSITIONS: INPUTS, HIDDEN: FINAL, LOGITS: LM_HEAD, TOKEN: SAMPLER}


@dataclass(frozen=True)
class Place:
    """A site taken apart.

    Attributes:
        name: the site.
        stage: one of the constants above.
        layer: the name of the layer or module, with `draft:` before a draft's; "" outside of them.
        part: what follows the last slash, e.g. "query"; "" for the output of a module.
        number: the layer's number; None where its name holds none.
        draft: whether it is a site of the draft.
    """

    name: str
    stage: str
    layer: str
    part: str
    number: int | None
    draft: bool = False

    @property
    def group(self) -> tuple[str, str]:
        """Sites of one group do not lie upstream of each other."""
        if self.stage == INPUTS:
            return (INPUTS, "")
        if self.stage == MODULE and self.part not in ROTATED:
            return (self.stage, self.name)
        return (self.stage, self.layer or self.name)

    @property
    def op(self) -> str:
        """What the op that takes this in computes; "" for what no op of a layer takes in."""
        return _OPS.get(self.part, "") if self.stage in (QKV, ROUTING) else ""


@lru_cache(maxsize=65536)
def place(name: str) -> Place:
    """Take the name of a site apart."""
    draft = name.startswith(DRAFT)
    stage = _STAGES.get(name.removeprefix(DRAFT))
    layer, _, part = name.rpartition("/")
    if stage is None and layer == AUXILIARY:
        stage = INSIDE
    if stage is None:
        stage = _stage(layer, part)
    if stage in (*_STAGES.values(), INSIDE, OTHER):
        return Place(name, stage, "", part, None, draft)
    if stage == MODULE and part not in _MODULE_PARTS and not part.isdecimal():
        layer, part = name, ""
    number = next((int(piece) for piece in layer.split(".") if NUMBER.fullmatch(piece)), None)
    return Place(name, stage, layer, part, number, draft)


def _stage(layer: str, part: str) -> str:
    if not layer or part in _MODULE_PARTS or part.isdecimal():
        return MODULE
    if part in _OUTPUTS:
        return OUTPUT
    if part in _ROUTING:
        return ROUTING
    return QKV if part in _OPS else OTHER


def taken_in(layer: str, names: Collection[str]) -> list[str]:
    """Sites of what the op of a layer takes in, whether or not they are among `names`, the sites known."""
    kinds = next((kinds for kinds in _KINDS if _of_kind(layer, kinds, names)), SITE_KINDS)
    return [f"{layer}/{part}" for part in kinds if part not in _OUTPUTS]


def key_value_sites(layer: str, names: Collection[str]) -> list[str]:
    """Sites of what an attention op writes into the KV cache and reads again; empty for other ops."""
    kinds = next((kinds for kinds in _KINDS if _of_kind(layer, kinds, names)), SITE_KINDS)
    return [f"{layer}/{part}" for part in kinds[1:-1]] if _KINDS[kinds] == ATTENTION else []


def _of_kind(layer: str, kinds: tuple[str, ...], names: Collection[str]) -> bool:
    """Whether a site of the layer is known that only layers of this kind have."""
    own = set(kinds) - set(_OUTPUTS) - {part for other in _KINDS if other is not kinds for part in other}
    return any(f"{layer}/{part}" in names for part in own)


def upstream(places: Sequence[Place], index: int, compared: Sequence[bool]) -> int | None:
    """The site from which the segment of site `index` starts; None if nothing upstream was compared.

    It is of the same model, the target or the draft. What is computed inside the forward and seen only at its
    end starts no segment, and the only site known to lie before it is the input.

    Args:
        places: sites in execution order.
        index: the differing site.
        compared: for each site, whether it was compared on that row.
    """
    before = places[index]
    there = [
        i
        for i in range(index)
        if compared[i] and places[i].draft == before.draft and places[i].stage != INSIDE
    ]
    inputs = next((i for i in there if places[i].stage == INPUTS), None)
    if before.stage == INSIDE:
        return inputs
    nearest = next((i for i in reversed(there) if places[i].group != before.group), None)
    return inputs if nearest is not None and places[nearest].stage == INPUTS else nearest
