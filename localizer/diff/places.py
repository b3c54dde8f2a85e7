"""What a site's name says: its layer, its part, and the group of sites that are computed side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from localizer.wire.spec import HIDDEN, INPUT_IDS, LOGITS, POSITIONS, SITE_KINDS, TOKEN

INPUTS, QKV, OUTPUT, FINAL, LM_HEAD, SAMPLER, OTHER = (
    "inputs", "qkv", "output", "hidden", "logits", "token", "other",
)  # fmt: skip
"""The stage of a forward pass that a site ends."""

NUMBER = re.compile(r"[0-9]{1,4}")
"""The layer's number within its name; longer ones are not trusted to be one."""

_STAGES = {INPUT_IDS: INPUTS, POSITIONS: INPUTS, HIDDEN: FINAL, LOGITS: LM_HEAD, TOKEN: SAMPLER}


@dataclass(frozen=True)
class Place:
    """A site taken apart.

    Attributes:
        name: the site.
        stage: one of the constants above.
        layer: the layer's name for attention sites, else "".
        part: "query", "key", "value", "output" for attention sites, else what follows the last slash.
        number: the layer's number; None where its name holds none.
    """

    name: str
    stage: str
    layer: str
    part: str
    number: int | None

    @property
    def group(self) -> tuple[str, str]:
        """Sites of one group do not lie upstream of each other."""
        if self.stage == INPUTS:
            return (INPUTS, "")
        return (self.stage, self.layer or self.name)


@lru_cache(maxsize=65536)
def place(name: str) -> Place:
    """Take the name of a site apart."""
    if name in _STAGES:
        return Place(name, _STAGES[name], "", name.rpartition("/")[2], None)
    layer, _, part = name.rpartition("/")
    if part not in SITE_KINDS:
        return Place(name, OTHER, "", part, None)
    number = next((int(piece) for piece in layer.split(".") if NUMBER.fullmatch(piece)), None)
    return Place(name, OUTPUT if part == "output" else QKV, layer, part, number)


def upstream(places: Sequence[Place], index: int, compared: Sequence[bool]) -> int | None:
    """The site from which the segment of site `index` starts; None if nothing upstream was compared.

    Args:
        places: sites in execution order.
        index: the differing site.
        compared: for each site, whether it was compared on that row.
    """
    group = places[index].group
    nearest = next((i for i in range(index - 1, -1, -1) if compared[i] and places[i].group != group), None)
    if nearest is None or places[nearest].stage != INPUTS:
        return nearest
    return next(i for i in range(nearest + 1) if compared[i] and places[i].stage == INPUTS)
