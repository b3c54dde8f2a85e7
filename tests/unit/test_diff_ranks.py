"""Diffs of captures of several ranks: which one differs, what other sizes share, what a lost rank costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import Plan, attention, bump, pair, write

from localizer.diff import diff, diff_within
from localizer.diff.places import key_value_sites, place, taken_in, upstream
from localizer.diff.result import DIVERGED, IDENTICAL, INCONCLUSIVE, Result
from localizer.errors import DamagedCapture
from localizer.report.formats import encoded
from localizer.store.reader import Capture
from localizer.wire.spec import HIDDEN, INPUT_IDS

TWO = Plan(ranks=2, traced=True)
OUTPUT = attention(1, "output")
REQUESTS = TWO.requests


def compared(root: Path, plan: Plan = TWO, **candidate: object) -> Result:
    ours, theirs = pair(root, plan, **candidate)
    return diff(Capture(ours), Capture(theirs), cells=True)


def codes(result: Result) -> list[str]:
    return [pattern.code for pattern in result.signatures]


def test_equal_captures(tmp_path: Path) -> None:
    result = compared(tmp_path)
    assert result.verdict == IDENTICAL
    assert (
        result.coverage.pairs.compared
        == 2 * compared(tmp_path / "1", replace(TWO, ranks=1)).coverage.pairs.compared
    )
    ours = Capture(tmp_path / "candidate" / "0001")
    stored = diff(ours, Capture(tmp_path / "parent" / "0001"), payload=True).coverage.stored
    assert stored is not None
    assert stored.pairs == result.coverage.pairs.compared
    assert diff_within(ours).verdict == IDENTICAL


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_of_one_rank(tmp_path: Path, rank: int) -> None:
    site = f"{OUTPUT}[{rank}/2]"
    changes = {(request, 1, site): bump() for request in REQUESTS}
    result = compared(tmp_path, changes=changes)
    assert result.verdict == DIVERGED
    assert result.first is not None
    assert result.first.site == site
    assert result.first.segment.after == f"{attention(1, 'value')}[{rank}/2]"
    assert result.first.blame == "attention"
    assert result.first.key_value is not None
    assert (result.first.key_value.equal, result.first.key_value.positions) == (1, 1)
    (found,) = [pattern for pattern in result.signatures if pattern.code == "one-rank"]
    assert (found.number, found.rows) == (rank, 3)


def test_a_fault_of_all_ranks_is_none_of_one(tmp_path: Path) -> None:
    changes = {(request, 1, f"{OUTPUT}[{rank}/2]"): bump() for request in REQUESTS for rank in (0, 1)}
    assert "one-rank" not in codes(compared(tmp_path, changes=changes))


def test_a_fault_of_one_rank_where_the_other_was_not_compared(tmp_path: Path) -> None:
    changes = {(request, 1, f"{OUTPUT}[1/2]"): bump() for request in REQUESTS}
    absent = frozenset({("r00.00", 1, f"{OUTPUT}[0/2]")})
    assert "one-rank" not in codes(compared(tmp_path, changes=changes, absent=absent, state="incomplete"))


@pytest.mark.parametrize("lost", ["candidate", "parent", "both", "other number"])
def test_a_fault_of_one_rank_where_a_third_was_not_compared(tmp_path: Path, lost: str) -> None:
    """Two of three ranks say nothing of the third: of the other ranks all must be known to be equal."""
    three = replace(TWO, ranks=3)
    site = f"{HIDDEN}@1"
    gone = {"manifest": False, "absent_ranks": frozenset({2})}
    ours = gone if lost in ("candidate", "both") else {}
    theirs = gone if lost in ("parent", "both") else {"ranks": 2} if lost == "other number" else {}
    changes = {(request, 1 + len(TWO.prompt(request)), site): bump() for request in REQUESTS}
    candidate = write(tmp_path, replace(three, name="candidate", changes=changes, **ours))
    parent = write(tmp_path, replace(three, name="parent", **theirs))
    result = diff(Capture(candidate), Capture(parent))
    assert result.first is not None
    assert result.first.site == site
    assert "one-rank" not in codes(result)


def test_a_fault_of_one_of_three_ranks(tmp_path: Path) -> None:
    changes = {(request, 4, f"{HIDDEN}@1"): bump() for request in REQUESTS}
    assert "one-rank" in codes(compared(tmp_path, replace(TWO, ranks=3), changes=changes))


@pytest.mark.parametrize(
    ("site", "attribution"),
    [
        (f"{attention(1, 'query')}[0/2]", "candidate-only"),
        (f"{attention(1, 'query')}[1/2]", "also-in-control"),
        (f"{attention(0, 'output')}[0/2]", "also-in-control"),
    ],
)
def test_noise_of_other_heads_is_not_upstream(tmp_path: Path, site: str, attribution: str) -> None:
    """Within a layer a rank computes its heads by itself; between layers all ranks add theirs up."""
    ours, theirs = pair(tmp_path, TWO, changes={("r00.00", 1, f"{OUTPUT}[1/2]"): bump()})
    noisy = write(tmp_path, replace(TWO, name="control", changes={("r00.00", 1, site): bump()}))
    assert diff(Capture(ours), Capture(theirs), [Capture(noisy)]).attribution == attribution


def test_a_copy_that_differs_on_one_rank(tmp_path: Path) -> None:
    result = compared(tmp_path, changes={("r00.00", 2, f"{HIDDEN}@1"): bump()})
    assert result.first is not None
    assert result.first.site == f"{HIDDEN}@1"
    assert result.first.segment.after == f"{attention(2, 'output')}[1/2]"
    assert codes(result) == ["one-rank"]


def test_one_worker_has_no_such_pattern(tmp_path: Path) -> None:
    changes = {(request, 1, OUTPUT): bump() for request in REQUESTS}
    assert "one-rank" not in codes(compared(tmp_path, replace(TWO, ranks=1), changes=changes))


def test_other_numbers_of_workers(tmp_path: Path) -> None:
    """What each rank holds whole is compared; what is split otherwise is told, and is in no other list."""
    result = compared(tmp_path, ranks=1)
    sites = result.coverage.sites
    assert {site.name for site in result.sites} == {
        *(INPUT_IDS, "model/positions", HIDDEN, "lm_head/logits", "sampler/token"),
    }
    assert sites.candidate_only == []
    assert sites.parent_only == [f"{site.name}@1" for site in result.sites]
    assert len(sites.split) == 12
    assert {(both.candidate, both.parent) for both in sites.split.values()} == {(1, 2)}
    assert result.verdict == IDENTICAL
    assert result.coverage.weights_equal is None
    text = encoded("text", result).decode()
    assert "not comparable: 12 sites that candidate and parent split otherwise over their workers" in text
    assert "observer.ranks" in {it.setting for it in result.differences}


def test_layers_that_are_split_otherwise_lie_inside_the_segment(tmp_path: Path) -> None:
    result = compared(tmp_path, ranks=1, changes={("r00.00", 2, HIDDEN): bump()})
    assert result.first is not None
    assert result.first.unobserved.layers == [0, 1, 2]
    assert "layers 0–2, of which no site was compared" in encoded("text", result).decode()


def test_a_lost_rank_is_inconclusive_and_says_so(tmp_path: Path) -> None:
    result = compared(tmp_path, manifest=False, absent_ranks=frozenset({1}))
    assert result.verdict == INCONCLUSIVE
    assert "rank 1 is missing" in [reason.detail for reason in result.reasons]
    assert f"{OUTPUT}[1/2]" in result.coverage.sites.parent_only


def test_what_a_lost_rank_leaves_may_still_diverge(tmp_path: Path) -> None:
    changes = {("r00.00", 1, f"{OUTPUT}[0/2]"): bump()}
    result = compared(tmp_path, manifest=False, absent_ranks=frozenset({1}), changes=changes)
    assert result.verdict == DIVERGED
    assert "rank 1 is missing" in [reason.detail for reason in result.reasons]


def test_a_killed_rank_lacks_rows(tmp_path: Path) -> None:
    result = compared(tmp_path, manifest=False, cut={1: 2})
    assert result.verdict == INCONCLUSIVE
    assert result.coverage.pairs.missing.candidate > 0
    ours, theirs = (Capture(tmp_path / name / "0001") for name in ("candidate", "parent"))
    assert diff(ours, theirs, payload=True).verdict == INCONCLUSIVE


def test_a_tampered_rank_is_refused(tmp_path: Path) -> None:
    ours, theirs = pair(tmp_path, TWO)
    path = ours / "rank-1" / "digests-00000.safetensors"
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(bytes(blob))
    with pytest.raises(DamagedCapture, match="rank-1"):
        diff(Capture(ours), Capture(theirs))


def test_drafts_of_ranks(tmp_path: Path) -> None:
    plan = replace(TWO, speculate=2)
    result = compared(
        tmp_path, plan, changes={("r00.00", 3, f"draft:{attention(3, 'output')}[1/2]@1"): bump()}
    )
    assert result.first is not None
    assert result.first.site == f"draft:{attention(3, 'output')}[1/2]"
    assert "one-rank" in codes(result)


FOUR = {
    f"l.attn/{part}": rank
    for rank, parts in enumerate(
        (
            ("query[0/4]", "key[0/2]", "value[0/2]", "output[0/4]"),
            ("query[1/4]", "key[0/2]@1", "value[0/2]@1", "output[1/4]"),
            ("query[2/4]", "key[1/2]", "value[1/2]", "output[2/4]"),
            ("query[3/4]", "key[1/2]@3", "value[1/2]@3", "output[3/4]"),
        )
    )
    for part in parts
}
"""Sites of one layer on four ranks that share two key heads, with their ranks."""


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("several", [True, False], ids=["ranks", "ranges of one rank"])
def test_an_output_goes_with_what_its_rank_took_in(rank: int, several: bool) -> None:
    ranks = FOUR if several else {name: 0 for name in FOUR if "@" not in name}
    owners = ranks if several else {}
    names = sorted(ranks, key=lambda name: ("query", "key", "value", "output").index(place(name).part))
    output = place(f"l.attn/output[{rank}/4]")
    copy = f"@{rank}" if several and rank % 2 else ""
    key, value = (f"l.attn/{part}[{rank // 2}/2]{copy}" for part in ("key", "value"))
    assert taken_in(output, names, owners) == [f"l.attn/query[{rank}/4]", key, value]
    assert key_value_sites(output, names, owners) == [key, value]
    places = [place(name) for name in names]
    index = names.index(output.name)
    after = upstream(places, index, [True] * len(names), owners)
    assert after is not None
    assert names[after] == value


def test_all_formats_tell_of_ranks(tmp_path: Path) -> None:
    changes = {(request, 1, f"{OUTPUT}[1/2]"): bump() for request in REQUESTS}
    result = compared(tmp_path, changes=changes)
    said = "only rank 1 differs where the difference enters"
    for how in ("text", "markdown", "html"):
        assert said in encoded(how, result).decode()
    assert "the attention output[1/2] of layer 1" in encoded("text", result).decode().replace("The", "the")
