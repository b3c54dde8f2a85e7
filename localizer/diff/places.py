"""What a site's name says: its layer, its part, and the group of sites that are computed side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from localizer.wire.spec import AUXILIARY, DRAFT, HIDDEN, INPUT_IDS, LOGITS, POSITIONS, SITE_KINDS, TOKEN

INPUTS, QKV, OUTPUT, INSIDE, FINAL, LM_HEAD, SAMPLER, OTHER = (
    "inputs", "qkv", "output", "auxiliary", "hidden", "logits", "token", "other",
)  # fmt: skip
"""The stage of a forward pass that a site ends; `INSIDE` ends none: it is computed between two layers, which
are not known, and seen only when the forward returns."""

NUMBER = re.compile(r"[0-9]{1,4}")
"""The layer's number within its name; longer ones are not trusted to be one."""

_STAGES = {INPUT_IDS: INPUTS, POSITIONS: INPUTS, HIDDEN: FINAL, LOGITS: LM_HEAD, TOKEN: SAMPLER}


@dataclass(frozen=True)
class Place:
    """A site taken apart.

    Attributes:
        name: the site.
        stage: one of the constants above.
        layer: the layer's name for attention sites, with `draft:` before a draft's, else "".
        part: "query", "key", "value", "output" for attention sites, else what follows the last slash.
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
        return (self.stage, self.layer or self.name)


@lru_cache(maxsize=65536)
def place(name: str) -> Place:
    """Take the name of a site apart."""
    draft = name.startswith(DRAFT)
    stage = _STAGES.get(name.removeprefix(DRAFT))
    layer, _, part = name.rpartition("/")
    if stage is None and layer == AUXILIARY:
        stage = INSIDE
    if stage is None and part not in SITE_KINDS:
        stage = OTHER
    if stage is not None:
        return Place(name, stage, "", part, None, draft)
    number = next((int(piece) for piece in layer.split(".") if NUMBER.fullmatch(piece)), None)
    return Place(name, OUTPUT if part == "output" else QKV, layer, part, number, draft)


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
