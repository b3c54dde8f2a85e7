"""The names of the sites of several workers: which part of a tensor a rank holds.

A rank of tensor parallelism computes some of the heads of each attention layer, and most other tensors whole.
The end of a site's name says what it has of them, so that sites of equal name hold the same numbers whatever
the number of ranks:

* `<layer>/query[0/2]`: the first of two equal ranges of the heads;
* `model/hidden_states@1`: all of it, once more on rank 1; without `@`, on the lowest rank that has it.
  `<layer>/key[0/2]@1` is a range that a lower rank has as well;
* `<layer>/latent@1/2`: what rank 1 of 2 holds, where it is not known which part that is.

Only names with a slash have such an end: a second call of a module is `<module>@2`, its outputs
`<module>@2/1`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

MOST_RANKS = 1024
"""More workers than any run has."""

_NAME = re.compile(
    r"(?P<base>.*?/[^/@\[\]]+)(?:\[(?P<index>\d{1,4})/(?P<of>\d{1,4})\])?"
    r"(?:@(?P<rank>\d{1,4})(?:/(?P<ranks>\d{1,4}))?)?",
    re.ASCII | re.DOTALL,
)


@dataclass(frozen=True)
class Part:
    """The name of a site taken apart.

    Attributes:
        base: the name on a single worker.
        index, of: which of how many equal ranges of the heads; 0 of 1 is all.
        rank: of a copy, or of a part that is not known, the worker; else None.
        ranks: of a part that is not known, the number of workers; else 0.
    """

    base: str
    index: int = 0
    of: int = 1
    rank: int | None = None
    ranks: int = 0

    @property
    def name(self) -> str:
        """The name of the site."""
        heads = f"[{self.index}/{self.of}]" if self.of > 1 else ""
        rank = "" if self.rank is None else f"@{self.rank}" + (f"/{self.ranks}" if self.ranks else "")
        return f"{self.base}{heads}{rank}"


@lru_cache(maxsize=65536)
def parse(name: str) -> Part:
    """Take the name of a site apart; one that is not written as above is a base."""
    found = _NAME.fullmatch(name)
    if found is None:
        return Part(name)
    numbers = {key: int(text) for key in ("index", "of", "rank", "ranks") if (text := found[key]) is not None}
    part = Part(found["base"], **numbers)
    sound = part.index < part.of and (not part.ranks or (part.rank or 0) < part.ranks)
    return part if sound and part.name == name else Part(name)


def base(name: str) -> str:
    """The name of a site on a single worker."""
    return parse(name).base


def matches(name: str, pattern: str) -> bool:
    """Whether a shell pattern matches a site: its name, or that on a single worker."""
    return name == pattern or fnmatchcase(name, pattern) or fnmatchcase(base(name), pattern)


def share(total: int, mine: int, rank: int, ranks: int) -> tuple[int, int, bool] | None:
    """Which range of `total` heads a rank holds that has `mine` of them.

    Ranks hold ranges in their order; where there are more ranks than ranges, neighbours hold the same one.

    Returns:
        Which range, of how many, and whether a lower rank has it too; None where the numbers do not fit.
    """
    if mine < 1 or total % mine or ranks % (total // mine):
        return None
    of = total // mine
    copies = ranks // of
    return rank // copies, of, rank % copies > 0


@dataclass(frozen=True)
class Naming:
    """How the sites of one worker are called.

    Attributes:
        rank, ranks: which of how many workers.
        heads: of sites that not every worker holds whole, by their names on a single worker, the range of
            heads as `share` gives it; None where it is not known which part it is.
        split: of sites that are recorded in several ranges of heads, into how many the whole is divided: a
            multiple of the ranges in `heads`.
    """

    rank: int = 0
    ranks: int = 1
    heads: Mapping[str, tuple[int, int, bool] | None] = field(default_factory=dict)
    split: Mapping[str, int] = field(default_factory=dict)

    def names(self, site: str) -> tuple[str, ...]:
        """The names of the ranges of a site in which this worker records it; most are one."""
        held = self.heads.get(site)
        if site not in self.split or held is None:
            return (self(site),)
        index, of, again = held
        several = self.split[site] // of
        rank = self.rank if again else None
        return tuple(
            Part(site, index * several + number, of * several, rank).name for number in range(several)
        )

    def __call__(self, site: str) -> str:
        """The name of a site on this worker."""
        if self.ranks == 1:
            return site
        held = self.heads.get(site, (0, 1, self.rank > 0))
        if held is None:
            return Part(site, rank=self.rank, ranks=self.ranks).name
        index, of, again = held
        return Part(site, index, of, self.rank if again else None).name
