"""Captures of several ranks: one table over all sites, what a rank lacks is not recorded, contradictions are
damage or reasons."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from builders import Plan, attention, write

from localizer.errors import DamagedCapture
from localizer.store import ranks, schema, tensors
from localizer.store.reader import Capture
from localizer.store.redact import Redactor, holds_tokens
from localizer.store.reduce import kept_digests, reduce, whole
from localizer.store.verify import DAMAGED, INCOMPLETE, SOUND, verify
from localizer.wire.spec import HIDDEN, INPUT_IDS

TWO = Plan(ranks=2, traced=True)
QUERY = attention(0, "query")


def changed(folder: Path, **observer: object) -> Path:
    """Rewrite what open.json says of the observer, and the manifest's record of it."""
    opening = schema.decode(folder / schema.OPEN, schema.Open)
    opening = msgspec.structs.replace(opening, observer=msgspec.structs.replace(opening.observer, **observer))
    tensors.replace(folder / schema.OPEN, schema.encode(opening))
    if (folder / schema.MANIFEST).exists():
        listed(folder)
    return folder


def listed(folder: Path, **fields: object) -> Path:
    """Make the manifest list the files as they are, with other fields."""
    manifest = schema.decode(folder / schema.MANIFEST, schema.Manifest)
    names = [file.name for file in manifest.files if (folder / file.name).exists()]
    files = [
        schema.Shard(
            name=name, size=(folder / name).stat().st_size, xxh3_128=tensors.file_digest(folder / name)
        )
        for name in names
    ]
    manifest = msgspec.structs.replace(manifest, files=files, **fields)
    tensors.replace(folder / schema.MANIFEST, schema.encode(manifest))
    return folder


def unlisted(folder: Path, rank: int) -> Path:
    """Take the shards of a rank away, and out of the journal."""
    shutil.rmtree(folder / f"rank-{rank}")
    path = folder / schema.JOURNAL
    lines = [line for line in path.read_text().splitlines() if f"rank-{rank}/" not in line]
    path.write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_all_ranks_are_one_table(tmp_path: Path) -> None:
    folder = write(tmp_path, TWO)
    one = Capture(write(tmp_path, replace(TWO, name="one", ranks=1)))
    capture = Capture(folder)
    assert verify(folder).state == SOUND
    assert [site.name for site in capture.sites[:8]] == [
        *(INPUT_IDS, f"{INPUT_IDS}@1", "model/positions", "model/positions@1"),
        *(f"{QUERY}[0/2]", f"{QUERY}[1/2]", f"{attention(0, 'key')}[0/2]", f"{attention(0, 'key')}[1/2]"),
    ]
    assert capture.site_ranks[:4] == [0, 1, 0, 1]
    assert len(capture.table) == len(one.table)
    for name, column in one.table.columns.items():
        assert np.array_equal(capture.table.columns[name], column)
    assert capture.steps == one.steps
    assert np.array_equal(capture.table.recorded()[:2], one.table.recorded()[[0, 0]])
    mine = [site.name for site in one.sites].index(HIDDEN)
    both = [[site.name for site in capture.sites].index(name) for name in (HIDDEN, f"{HIDDEN}@1")]
    for column in both:
        assert np.array_equal(capture.table.digest[:, column], one.table.digest[:, mine])
    rows = np.array([7, 2, 2, 0])
    assert np.array_equal(capture.table.digest[rows], np.asarray(capture.table.digest)[rows])
    assert np.array_equal(capture.table.present[3:6], np.asarray(capture.table.present)[3:6])
    for site in (f"{QUERY}[0/2]", f"{QUERY}[1/2]"):
        assert capture.row_payload(site, 3) is not None


@pytest.mark.parametrize("shards", [1, 4])
def test_a_shorter_rank_is_a_prefix(tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if shards > 1:
        monkeypatch.setattr("localizer.store.writer.SHARD_ROWS", 4)
    folder = write(tmp_path, replace(TWO, manifest=False, cut={1: 2}))
    capture = Capture(folder)
    assert verify(folder).state == INCOMPLETE
    columns = [number for number, rank in enumerate(capture.site_ranks) if rank == 1]
    total = int((capture.table.columns["step"] < 2).sum())
    assert capture.short == [f"rank 1 has {total} of {len(capture.table)} rows"]
    assert not capture.table.present[total:][:, columns].any()
    assert not capture.table.digest[total:][:, columns].any()
    assert capture.table.present[:total, columns[0]].all()
    assert capture.row_payload(f"{QUERY}[1/2]", total) is None
    assert capture.row_payload(f"{QUERY}[1/2]", total - 1) is not None
    assert capture.row_payload(f"{QUERY}[0/2]", total) is not None
    every = np.arange(len(capture.table))[::-1]
    assert np.array_equal(capture.table.present[every], np.asarray(capture.table.present)[::-1])


def test_the_longest_rank_gives_the_table(tmp_path: Path) -> None:
    capture = Capture(write(tmp_path, replace(TWO, manifest=False, cut={0: 1})))
    whole_table = Capture(write(tmp_path, replace(TWO, name="whole"))).table
    assert np.array_equal(capture.table.columns["position"], whole_table.columns["position"])
    assert capture.short[0].startswith("rank 0 has ")
    assert not capture.table.present[len(whole_table) - 1, 0]


def test_a_rank_that_is_missing(tmp_path: Path) -> None:
    folder = write(tmp_path, replace(TWO, manifest=False, absent_ranks=frozenset({1})))
    assert verify(folder).state == INCOMPLETE
    assert Capture(folder).reasons[1:] == ["rank 1 is missing"]
    assert Capture(folder).short == ["rank 1 is missing"]


def test_a_rank_that_is_missing_although_it_is_listed(tmp_path: Path) -> None:
    folder = write(tmp_path, TWO)
    shutil.rmtree(folder / "rank-1")
    found = verify(folder)
    assert found.state == DAMAGED
    assert "rank-1" in found.reasons[0]


def test_a_complete_capture_without_a_rank_is_damaged(tmp_path: Path) -> None:
    folder = listed(unlisted(write(tmp_path, TWO), 1))
    found = verify(folder)
    assert found.state == DAMAGED
    assert "it is said to be complete, but rank 1 is missing" in found.reasons[0]
    with pytest.raises(DamagedCapture):
        _ = Capture(folder).table
    listed(folder, state="incomplete", reasons=["rank 1 is missing"])
    assert verify(folder).state == INCOMPLETE


def test_a_complete_capture_of_ranks_that_computed_other_rows_is_damaged(tmp_path: Path) -> None:
    folder = write(tmp_path, replace(TWO, cut={1: 3}))
    assert "rank 1 has " in verify(folder).reasons[0]
    assert verify(folder).state == DAMAGED


def contradicting(root: Path, state: str) -> Path:
    """A capture whose rank 1 computed other rows than rank 0 from the second step on."""
    folder = write(root, replace(TWO, state=state, reasons=("why",) * (state == "incomplete")))
    other = write(root, replace(TWO, name="other", outputs={"r00.00": [1, 2, 3, 4]}))
    shutil.rmtree(folder / "rank-1")
    shutil.copytree(other / "rank-1", folder / "rank-1")
    lines = [
        *(line for line in (folder / schema.JOURNAL).read_text().splitlines() if "rank-0" in line),
        *(line for line in (other / schema.JOURNAL).read_text().splitlines() if "rank-1" in line),
    ]
    (folder / schema.JOURNAL).write_text("".join(f"{line}\n" for line in lines))
    return listed(folder)


@pytest.mark.parametrize("state", ["complete", "incomplete"])
def test_ranks_that_contradict_each_other(tmp_path: Path, state: str) -> None:
    """What a rank computed for other rows is none of the table's rows: damage, or a reason."""
    folder = contradicting(tmp_path, state)
    found = verify(folder)
    capture = Capture(folder)
    assert capture.short == ["rank 1 has other rows than the others from step 1 on"]
    assert found.state == (DAMAGED if state == "complete" else INCOMPLETE)
    if state == "incomplete":
        columns = [number for number, rank in enumerate(capture.site_ranks) if rank == 1]
        later = capture.table.columns["step"] >= 1
        assert not capture.table.present[later][:, columns].any()
        assert capture.row_payload(f"{QUERY}[1/2]", len(capture.table) - 1) is None


@pytest.mark.parametrize("redacted", [False, True])
def test_a_part_of_ranks_that_contradict_each_other(tmp_path: Path, redacted: bool) -> None:
    """A part makes no rows of the table of what a rank computed for others, nor tells of them."""
    capture = Capture(contradicting(tmp_path, "incomplete"))
    cut = whole(capture)
    total = sum(part.rows for part in capture._joined[1] if part.rank == 1)
    columns = [number for number, rank in enumerate(capture.site_ranks) if rank == 1]
    assert not cut.payload[total:][:, columns].any()
    redactor = Redactor([capture], [["r00.00"]]) if redacted else None
    cut.digests[-1] = redacted
    cut.payload[-1] = False
    for column, site in enumerate(capture.sites):
        if redactor is not None and holds_tokens(site.name):
            cut.payload[:, column] &= redactor.told(site.name, capture.table.prefix)
    reduce(capture, tmp_path / "part", cut, redactor, kept_digests(capture, cut))
    part = Capture(tmp_path / "part")
    assert verify(part.folder).state == INCOMPLETE
    assert part.short == [f"rank 1 has {total} of {len(capture.table)} rows"]
    there, before = np.asarray(part.table.present), np.asarray(capture.table.present)
    before[~cut.digests] = False
    assert np.array_equal(there, before)


def test_more_ranks_than_open_json_says_are_foreign(tmp_path: Path) -> None:
    folder = changed(write(tmp_path, TWO), ranks=1)
    assert verify(folder).state == DAMAGED
    assert "foreign file 'rank-1/" in verify(folder).reasons[0]


def test_ranks_that_never_were(tmp_path: Path) -> None:
    folder = changed(write(tmp_path, TWO), ranks=1000)
    assert verify(folder).state == DAMAGED
    assert "rank 2 is missing" in verify(folder).reasons[0]
    with pytest.raises(DamagedCapture):
        Capture(changed(write(tmp_path, replace(TWO, name="huge")), ranks=1 << 40))


def test_a_site_has_one_rank(tmp_path: Path) -> None:
    folder = write(tmp_path, replace(TWO, manifest=False))
    one = write(tmp_path, replace(TWO, name="one", ranks=1, manifest=False))
    shutil.rmtree(folder / "rank-1")
    shutil.copytree(one / "rank-0", folder / "rank-1")
    lines = [
        *(line for line in (folder / schema.JOURNAL).read_text().splitlines() if "rank-0" in line),
        *(one / schema.JOURNAL).read_text().replace("rank-0", "rank-1").splitlines(),
    ]
    (folder / schema.JOURNAL).write_text("".join(f"{line}\n" for line in lines))
    found = verify(folder)
    assert found.state == DAMAGED
    assert "which is another rank's" in found.reasons[0]


def test_a_trace_of_another_schedule(tmp_path: Path) -> None:
    folder = write(tmp_path, TWO)
    path = folder / "rank-1" / "steps-00000.jsonl"
    path.write_text(path.read_text().replace('"computed":[0]', '"computed":[1]', 1))
    journal = folder / schema.JOURNAL
    lines = []
    for line in journal.read_text().splitlines():
        shard = msgspec.json.decode(line, type=schema.Shard)
        if shard.name == "rank-1/steps-00000.jsonl":
            shard = schema.Shard(
                name=shard.name, size=path.stat().st_size, xxh3_128=tensors.file_digest(path)
            )
        lines.append(msgspec.json.encode(shard).decode())
    journal.write_text("".join(f"{line}\n" for line in lines))
    listed(folder)
    assert "rank 1 was scheduled other steps than rank 0, first step 0" in verify(folder).reasons[0]


def test_a_part_of_it_is_such_a_capture(tmp_path: Path) -> None:
    capture = Capture(write(tmp_path, TWO))
    cut = whole(capture)
    cut.digests[5:] = False
    cut.payload[5:] = False
    left_out = reduce(capture, tmp_path / "part", cut)
    assert left_out
    part = Capture(tmp_path / "part")
    assert verify(part.folder).state == INCOMPLETE
    assert np.array_equal(np.asarray(part.table.digest)[:5], np.asarray(capture.table.digest)[:5])
    assert not np.asarray(part.table.present)[5:].any()
    assert part.manifest is not None
    assert part.manifest.coverage[f"{QUERY}[1/2]"].recorded == 5


def test_sites_of_ranks_lie_side_by_side() -> None:
    first = [(name, name) for name in ("a/x", "b/query[0/2]", "c/x")]
    second = [(name, name) for name in ("a/x@1", "n/x@1", "b/query[1/2]", "c/x@1", "z/x@1")]
    assert ranks.side_by_side([first, second]) == [
        *("a/x", "a/x@1", "n/x@1", "b/query[0/2]", "b/query[1/2]", "c/x", "c/x@1", "z/x@1"),
    ]
    assert ranks.side_by_side([]) == []
    third = [(name, name) for name in ("c/x@2", "y/x@2", "a/x@2", "z/x@2")]  # as no rank computes
    assert ranks.side_by_side([first, second, third]) == [
        *("a/x", "a/x@1", "a/x@2", "n/x@1", "b/query[0/2]", "b/query[1/2]"),
        *("c/x", "c/x@1", "c/x@2", "y/x@2", "z/x@1", "z/x@2"),
    ]


def test_many_sites_of_ranks_that_say_the_opposite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes a capture decides on their number and order: no site is looked for among all."""
    compared = 0

    class Base(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    monkeypatch.setattr(ranks.ranks, "base", lambda name: Base(name.partition("@")[0]))
    names = [f"{number}/x" for number in range(1000)]
    found = ranks.side_by_side(
        [[(name, name) for name in names], [(f"{name}@1", name) for name in names[::-1]]]
    )
    assert found == [name for name in names for _ in range(2)]
    assert compared < 10 * len(names)


@pytest.mark.parametrize("number", [1, 2])
def test_behind_a_torn_line_of_the_journal_other_ranks_may_go_on(tmp_path: Path, number: int) -> None:
    """As on a full disk: what the line and the next one listed is not there, the rest is; for one rank it is
    damage."""
    folder = write(tmp_path, replace(TWO, ranks=number, manifest=False))
    path = folder / schema.JOURNAL
    lines = path.read_text().splitlines(keepends=True)
    which = next(place for place, line in enumerate(lines) if f"rank-{number - 1}/payload" in line)
    path.write_text("".join([*lines[:which], '{"name":"rank-0/ro', *lines[which:]]))
    if number == 1:
        with pytest.raises(DamagedCapture, match=f"is damaged in line {which + 1}"):
            Capture(folder)
        return
    capture = Capture(folder)
    assert len(capture.files) == len(lines) - 1
    assert len(capture.table) > 0
    assert verify(folder).state == INCOMPLETE
