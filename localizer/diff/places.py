"""What a site's name says: its layer, its part, and the group of sites that are computed side by side."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from localizer.wire import ranks
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
        suffix: what the name says of the part that a rank holds, such as `[0/2]` or `@1`, see
            `localizer.wire.ranks`; "" for all of it on a single worker.
    """

    name: str
    stage: str
    layer: str
    part: str
    number: int | None
    draft: bool = False
    suffix: str = ""

    @property
    def base(self) -> str:
        """The name of the site on a single worker."""
        return self.name.removesuffix(self.suffix)

    @property
    def group(self) -> tuple[str, str]:
        """Sites of one group do not lie upstream of each other; the same site of all ranks is in one."""
        if self.stage == INPUTS:
            return (INPUTS, "")
        if self.stage == MODULE and self.part not in ROTATED:
            return (self.stage, self.base)
        return (self.stage, self.layer or self.base)

    @property
    def op(self) -> str:
        """What the op that takes this in computes; "" for what no op of a layer takes in."""
        return _OPS.get(self.part, "") if self.stage in (QKV, ROUTING) else ""


@lru_cache(maxsize=65536)
def place(name: str) -> Place:
    """Take the name of a site apart."""
    draft = name.startswith(DRAFT)
    base = ranks.base(name)
    suffix = name[len(base) :]
    stage = _STAGES.get(base.removeprefix(DRAFT))
    layer, _, part = base.rpartition("/")
    if stage is None and layer == AUXILIARY:
        stage = INSIDE
    if stage is None:
        stage = _stage(layer, part)
    if stage in (*_STAGES.values(), INSIDE, OTHER):
        return Place(name, stage, "", part, None, draft, suffix)
    if stage == MODULE and part not in _MODULE_PARTS and not part.isdecimal():
        layer, part = base, ""
    number = next((int(piece) for piece in layer.split(".") if NUMBER.fullmatch(piece)), None)
    return Place(name, stage, layer, part, number, draft, suffix)


def _stage(layer: str, part: str) -> str:
    if not layer or part in _MODULE_PARTS or part.isdecimal():
        return MODULE
    if part in _OUTPUTS:
        return OUTPUT
    if part in _ROUTING:
        return ROUTING
    return QKV if part in _OPS else OTHER


def taken_in(output: Place, names: Collection[str], owners: Mapping[str, int]) -> list[str]:
    """Sites of what the op that gives an output takes in, whether or not they are among `names`.

    Args:
        output: a site of the op's layer.
        names: the sites known.
        owners: the rank of each of them; empty where there is one.
    """
    return _of_op(output, names, owners, [part for part in _kinds(output, names) if part not in _OUTPUTS])


def key_value_sites(output: Place, names: Collection[str], owners: Mapping[str, int]) -> list[str]:
    """Sites of what an attention op writes into the KV cache and reads again; empty for other ops."""
    kinds = _kinds(output, names)
    return _of_op(output, names, owners, kinds[1:-1]) if _KINDS[kinds] == ATTENTION else []


def _kinds(where: Place, names: Collection[str]) -> tuple[str, ...]:
    """The parts of a layer of the kind of which a site is known that only layers of this kind have."""
    for kinds in _KINDS:
        own = set(kinds) - set(_OUTPUTS) - {part for other in _KINDS if other is not kinds for part in other}
        known = {place(name).base for name in names} if where.suffix else names
        if any(f"{where.layer}/{part}" in known for part in own):
            return kinds
    return SITE_KINDS


def _of_op(
    output: Place, names: Collection[str], owners: Mapping[str, int], parts: Sequence[str]
) -> list[str]:
    """The sites of these parts that are computed with an output: on its rank, of the same heads."""
    found = [f"{output.layer}/{part}" for part in parts]
    if not output.suffix and not owners:
        return found
    known = [there for name in names if (there := place(name)).layer == output.layer]
    return [
        max(
            (
                there
                for there in known
                if there.base == base and owners.get(there.name) == owners.get(output.name)
            ),
            key=lambda there: same_heads(there, output),
            default=Place(base + output.suffix, QKV, output.layer, "", None),
        ).name
        for base in found
    ]


def same_heads(one: Place, other: Place) -> bool:
    """Whether the ranges of heads that two sites hold overlap; where that is not known, or all, they do."""
    ours, theirs = ranks.parse(one.name), ranks.parse(other.name)
    return (
        ours.index * theirs.of < (theirs.index + 1) * ours.of
        and theirs.index * ours.of < (ours.index + 1) * theirs.of
    )


def upstream(
    places: Sequence[Place], index: int, compared: Sequence[bool], owners: Mapping[str, int] | None = None
) -> int | None:
    """The site from which the segment of site `index` starts; None if nothing upstream was compared.

    It is of the same model, the target or the draft. What is computed inside the forward and seen only at its
    end starts no segment, and the only site known to lie before it is the input. Of the sites of several
    ranks, or of several ranges of heads, it is that of the same ones.

    Args:
        places: sites in execution order.
        index: the differing site.
        compared: for each site, whether it was compared on that row.
        owners: the rank of each site by name; empty where there is one.
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
    if nearest is not None and (owners or before.suffix):
        owner = (owners or {}).get
        nearest = max(
            (i for i in there if places[i].group == places[nearest].group),
            key=lambda i: (owner(places[i].name) == owner(before.name), same_heads(places[i], before), i),
        )
    return inputs if nearest is not None and places[nearest].stage == INPUTS else nearest
