"""What the writers of several workers said, as if one had written everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from localizer.store.ranks import side_by_side

TABLES = ("expected", "recorded", "not_applicable", "untapped", "code")
"""What a writer says by site or layer."""


def merged(written: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """What the writers said, by rank, as one record; empty where there were none.

    The workers do the same steps: of their counts each is that of the worker that counted most.
    """
    several = [written[rank] for rank in sorted(written)]
    if len(several) < 2:
        return dict(several[0]) if several else {}
    sites = [[(site["name"], site) for site in one["sites"]] for one in several]
    counts: Counter[str] = Counter()
    for one in several:
        counts |= Counter(one["counts"])
    return {
        "sites": side_by_side(sites),
        **{table: {name: what for one in several for name, what in one[table].items()} for table in TABLES},
        "counts": {name: counts[name] for one in several for name in one["counts"]},
        "complaints": told([one["complaints"] for one in several]),
        "journal": max(one["journal"] for one in several),
        "exit_status": max((one.get("exit_status", 0) for one in several), key=abs),
    }


def told(sentences: Sequence[Sequence[str]]) -> list[str]:
    """What is said of each rank; where there are several, each sentence says of which."""
    if len(sentences) == 1:
        return list(sentences[0])
    return [f"rank {rank}: {text}" for rank, mine in enumerate(sentences) for text in mine]


def named(what: str, several: Mapping[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Processes of all ranks by name: `what`, or `what-N` where there are several."""
    if len(several) == 1:
        return {what: next(iter(several.values()))}
    return {f"{what}-{rank}": several[rank] for rank in sorted(several)}
