"""The writer turns a stream of steps into shards that hold its rows, prefixes, digests and payload."""

from __future__ import annotations

import io
import json
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from builders import Plan, write
from hypothesis import given, settings
from hypothesis import strategies as st

from localizer.store import writer as module
from localizer.store.digest import XXH3
from localizer.store.dtypes import NUMPY, itemsize
from localizer.store.journal import append_journal
from localizer.store.prefix import prefix_digest
from localizer.store.reader import Capture
from localizer.store.schema import DECIDES_TOKEN, FEEDS_LOGITS, KINDS, PLAIN, Shard, Site
from localizer.store.writer import RankWriter, StreamError, execution_order
from localizer.wire.rowsum import ROWSUM

ALL = Site(name="a/all", rows="all")
LOGITS = Site(name="b/logits", rows="logits")
TOKENS = Site(name="c/tokens", rows="tokens")
PROMPTS = ((1, 2, 3), (4, 5, 6))
REQUESTS = ["r00.00", "r01.00", "r01.01"]


def folder_in(root: Path) -> Path:
    """A capture's folder with open.json and an empty journal, of a workload of REQUESTS."""
    return write(root, Plan(prompts=PROMPTS, matrix=(1, 2), manifest=False, only_tokens=True))


def writer_for(folder: Path, sites: Sequence[Site] = (ALL, LOGITS, TOKENS), keep: bool = True) -> RankWriter:
    """A writer in round 1 (of requests x and y) with float32 rows of shape [2]."""
    rank = RankWriter(folder, 0, REQUESTS, [PROMPTS[0], PROMPTS[0], PROMPTS[1]])
    rank.register(sites, None if keep else frozenset())
    for index, site in enumerate(sites):
        if site.rows != "tokens":
            rank.layout(index, "float32", (2,))
    rank.round({"x": "r01.00", "y": "r01.01"})
    return rank


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_in(tmp_path)


@pytest.fixture
def rank(folder: Path) -> RankWriter:
    return writer_for(folder)


def data(*rows: Sequence[float]) -> memoryview:
    return memoryview(np.array(rows, np.float32).tobytes())


def columns(folder: Path, *names: str) -> list[list[int]]:
    table = Capture(folder).table
    return [table.columns[name].tolist() for name in names]


def test_a_step_becomes_rows(folder: Path, rank: RankWriter) -> None:
    rank.begin_step(7, ["y", "x"], [3, 2], [4, 5, 6, 1, 2], [0, 1, 2, 0, 1], [1, 0])
    rank.rows(0, 0, 5, data([0, 0], [1, 1], [2, 2], [3, 3], [4, 4]))
    rank.rows(1, 0, 1, data([9, 9]))
    rank.end_step({"y": [8]})
    summary = rank.close()
    assert columns(folder, "request", "position", "token", "step", "occurrence") == [
        [2, 2, 2, 1, 1], [0, 1, 2, 0, 1], [4, 5, 6, 1, 2], [7] * 5, [0] * 5,
    ]  # fmt: skip
    assert columns(folder, "logits", "sampled") == [
        [PLAIN, PLAIN, DECIDES_TOKEN, PLAIN, PLAIN],
        [-1, -1, 8, -1, -1],
    ]
    table = Capture(folder).table
    assert [bytes(row) for row in table.prefix] == [
        *(prefix_digest([4, 5, 6][:length]) for length in (1, 2, 3)),
        *(prefix_digest([1, 2][:length]) for length in (1, 2)),
    ]
    assert table.present[:].tolist() == [[True, row == 2, row == 2] for row in range(5)]
    assert bytes(table.digest[3, 0]) == xxhash.xxh3_128_digest(data([3, 3]))
    assert bytes(table.digest[2, 2]) == xxhash.xxh3_128_digest((8).to_bytes(8, "little"))
    assert summary.expected == summary.recorded == {"a/all": 5, "b/logits": 1, "c/tokens": 1}
    assert summary.counts == {
        "steps": 1, "rows": 5, "logit_rows": 1, "draft_rows": 0, "draft_padding_rows": 0,
        "rows_without_prefix": 0, "prompt_mismatches": 0,
    }  # fmt: skip
    assert summary.complaints == []


def test_kinds_of_rows(folder: Path, rank: RankWriter) -> None:
    rank.begin_step(0, ["x", "y"], [3, 2], [1, 2, 3, 4, 5], [0, 1, 2, 0, 1], [1, 0])
    rank.begin_step(1, ["x", "y"], [1, 1], [7, 6], [3, 2], [1, 1])
    rank.begin_step(2, ["y"], [1], [7], [3], [1])
    rank.end_step({})
    rank.close()
    kinds = [KINDS[code] for code in columns(folder, "kind")[0]]
    assert kinds == ["prefill"] * 3 + ["prefill-chunk"] * 2 + ["decode", "prefill-chunk", "decode"]


def test_a_prompt_whose_start_was_cached_is_a_prefill(folder: Path, rank: RankWriter) -> None:
    rank.begin_step(0, ["x"], [1], [3], [2], [1])
    rank.end_step({})
    rank.close()
    assert columns(folder, "kind", "occurrence") == [[KINDS.index("prefill")], [0]]


def test_logit_rows_that_decide_no_token(folder: Path, rank: RankWriter) -> None:
    """A verification of two drafts, the first rejected: three rows feed logits, one gives a token."""
    rank.begin_step(0, ["x"], [3], [1, 2, 3], [0, 1, 2], [1])
    rank.end_step({"x": [5]})
    rank.begin_step(1, ["x"], [3], [5, 6, 7], [3, 4, 5], [3])
    rank.end_step({"x": [9], "unknown": [1], "y": []})
    summary = rank.close()
    assert columns(folder, "logits", "sampled") == [
        [PLAIN, PLAIN, DECIDES_TOKEN, DECIDES_TOKEN, FEEDS_LOGITS, FEEDS_LOGITS],
        [-1, -1, 5, 9, -1, -1],
    ]
    assert summary.expected == {"a/all": 6, "b/logits": 4, "c/tokens": 2}
    assert summary.recorded == {"a/all": 0, "b/logits": 0, "c/tokens": 2}


def test_rows_may_come_in_parts(folder: Path, rank: RankWriter) -> None:
    rank.begin_step(0, ["x", "y"], [1, 3], [1, 4, 5, 6], [0, 0, 1, 2], [0, 1])
    rank.rows(0, 2, 2, data([2, 2], [3, 3]))
    rank.rows(0, 0, 1, data([0, 0]))
    rank.end_step({})
    summary = rank.close()
    capture = Capture(folder)
    assert capture.table.present[:, 0].tolist() == [True, False, True, True]
    assert capture.table.digest[1, 0].tolist() == [0] * 16
    kept = [capture.row_payload("a/all", row) for row in range(4)]
    assert [None if row is None else row.tolist() for row in kept] == [[0, 0], None, [2, 2], [3, 3]]
    assert (summary.expected["a/all"], summary.recorded["a/all"]) == (4, 3)


def test_a_site_reached_twice_keeps_the_first_and_complains(folder: Path, rank: RankWriter) -> None:
    rank.begin_step(0, ["x"], [1], [1], [0], [0])
    rank.rows(0, 0, 1, data([1, 1]))
    rank.rows(0, 0, 1, data([2, 2]))
    rank.end_step({})
    summary = rank.close()
    assert "a/all was reached more than once" in summary.complaints[0]
    assert summary.recorded["a/all"] == 1
    kept = Capture(folder).row_payload("a/all", 0)
    assert kept is not None
    assert kept.tolist() == [1, 1]


def test_digests_without_payload(folder: Path) -> None:
    rank = writer_for(folder, keep=False)
    rank.begin_step(0, ["x"], [1], [1], [0], [0])
    rank.rows(0, 0, 1, data([1, 1]))
    rank.end_step({})
    rank.close()
    assert sorted(path.name for path in (folder / "rank-0").iterdir()) == [
        "digests-00000.safetensors",
        "rows-00000.safetensors",
    ]


def test_input_that_is_not_the_prompt_is_counted(rank: RankWriter) -> None:
    rank.begin_step(0, ["x"], [3], [1, 9, 3], [0, 1, 2], [1])
    rank.end_step({})
    assert rank.close().counts["prompt_mismatches"] == 1


def test_rows_after_unknown_tokens_are_counted(folder: Path, rank: RankWriter) -> None:
    rank.begin_step(0, ["x"], [1], [1], [5], [1])
    rank.end_step({})
    assert rank.close().counts["rows_without_prefix"] == 1
    assert Capture(folder).table.prefix.tolist() == [[0] * 16]


def test_a_step_that_never_ended_is_dropped_with_a_complaint(folder: Path, rank: RankWriter) -> None:
    rank.begin_step(0, ["x"], [1], [1], [0], [0])
    assert rank.close().complaints == ["the last step was cut off"]
    assert len(Capture(folder).table) == 0


def test_shards_are_closed_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_ROWS", 2)
    rank = writer_for(folder)
    for position, token in enumerate([1, 2, 3, 7, 8]):
        rank.begin_step(position, ["x"], [1], [token], [position], [0])
        rank.rows(0, 0, 1, data([position, 0]))
        rank.end_step({})
    rank.close()
    capture = Capture(folder)
    assert [file.name for file in capture.files] == [
        f"rank-0/{what}-{number:05d}.safetensors"
        for number in range(3)
        for what in ("rows", "digests", "payload")
    ]
    assert capture.table.columns["position"].tolist() == [0, 1, 2, 3, 4]
    for row in range(5):
        kept = capture.row_payload("a/all", row)
        assert kept is not None
        assert kept.tolist() == [row, 0]


def test_shards_are_closed_by_payload_bytes_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 8)
    rank = writer_for(folder)
    for step in range(3):
        rank.begin_step(step, ["x"], [1], [1], [0], [0])
        rank.rows(0, 0, 1, data([step, 0]))
        rank.end_step({})
    rank.close()
    assert len(Capture(folder).files) == 9


def test_a_site_that_changes_its_layout_is_dropped(folder: Path, rank: RankWriter) -> None:
    rank.begin_step(0, ["x"], [1], [1], [0], [0])
    rank.rows(0, 0, 1, data([1, 1]))
    rank.end_step({})
    rank.layout(0, "bfloat16", (3,))
    rank.begin_step(1, ["x"], [1], [2], [1], [0])
    rank.rows(0, 0, 1, memoryview(bytes(6)))
    rank.end_step({})
    rank.layout(0, "bfloat16", (4,))  # said once, however often it changes, and dropped for good
    rank.layout(0, "float32", (2,))
    rank.begin_step(2, ["x"], [1], [3], [2], [0])
    rank.rows(0, 0, 1, data([1, 1]))
    rank.end_step({})
    summary = rank.close()
    assert (summary.expected["a/all"], summary.recorded["a/all"]) == (3, 1)
    assert summary.complaints == [
        "a/all changed from float32 [2] to bfloat16 [3]; its later rows are not kept"
    ]
    assert Capture(folder).table.present[:, 0].tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (lambda rank: rank.end_step({}), "had not begun"),
        (lambda rank: rank.rows(0, 0, 1, data([1, 1])), "outside a step"),
        (lambda rank: rank.layout(0, "complex64", ()), "unknown dtype complex64"),
        (lambda rank: rank.begin_step(0, ["z"], [1], [1], [0], [0]), "unknown request 'z'"),
        (lambda rank: rank.begin_step(3, ["x"], [2], [1], [0], [0]), "a batch has 2 rows but 1 tokens"),
        (lambda rank: rank.begin_step(0, ["x"], [1], [1], [0], [2]), "1 rows of 'x', 2 of them"),
        (lambda rank: rank.begin_step(0, ["x"], [0], [], [], [0]), r"row counts \[0\]"),
        (lambda rank: begun(rank).rows(0, 0, 1, data([1, 1], [2, 2])), "should take 8 bytes, not 16"),
        (lambda rank: begun(rank).rows(0, 1, 2, data([1, 1], [2, 2])), r"has no rows 1\.\.2"),
        (lambda rank: begun(rank).rows(1, 0, 2, data([1, 1], [2, 2])), r"has no rows 0\.\.1 for b/logits"),
    ],
)
def test_a_stream_that_contradicts_itself_is_refused(
    rank: RankWriter, stream: Callable[[RankWriter], None], says: str
) -> None:
    with pytest.raises(StreamError, match=says):
        stream(rank)


def entries(*rows: Sequence[int]) -> np.ndarray:
    return np.array(rows, np.int64)


def test_a_frame_of_rows_that_lie_apart(folder: Path, rank: RankWriter) -> None:
    """Rows of two sites lie between each other, in the order in which the table names them."""
    body = data([1, 1], [7, 7], [2, 2], [9, 9])
    begun(rank).frame(entries([0, 0, 2, 8, 16, 0], [1, 0, 1, 8, 8, 24]), body)
    rank.end_step({"x": [5]})
    summary = rank.close()
    assert summary.recorded == {"a/all": 2, "b/logits": 1, "c/tokens": 1}
    capture = Capture(folder)
    kept = [capture.row_payload(site, row) for site, row in (("a/all", 0), ("a/all", 1), ("b/logits", 1))]
    assert [None if row is None else row.tolist() for row in kept] == [[1, 1], [2, 2], [9, 9]]
    assert bytes(capture.table.digest[1, 1]) == xxhash.xxh3_128_digest(data([9, 9]))


def test_a_frame_may_name_a_site_twice(folder: Path, rank: RankWriter) -> None:
    """Parts of its rows; the second time for the same rows is not kept, and the other rows are."""
    body = data([1, 1], [2, 2], [3, 3])
    begun(rank).frame(entries([0, 1, 1, 8, 8, 8], [0, 0, 1, 8, 8, 0], [0, 0, 1, 8, 8, 16]), body)
    rank.frame(entries([0, 0, 1, 8, 8, 16], [1, 0, 1, 8, 8, 16]), body)
    rank.end_step({})
    summary = rank.close()
    assert summary.complaints == ["a/all was reached more than once in a forward; the first time is kept"]
    assert (summary.recorded["a/all"], summary.recorded["b/logits"]) == (2, 1)
    assert Capture(folder).table.present[:, 0].tolist() == [True, True]


def test_a_table_that_points_beyond_its_frame_is_refused(rank: RankWriter) -> None:
    with pytest.raises(StreamError, match="beyond its frame"):
        begun(rank).frame(entries([0, 0, 2, 8, 16, 8]), data([1, 1], [2, 2], [3, 3]))


def test_a_site_may_be_added_during_a_step(folder: Path, rank: RankWriter) -> None:
    begun(rank).rows(0, 0, 2, data([0, 0], [1, 1]))
    rank.add_site(Site(name="d/late", rows="all"))
    rank.layout(3, "float32", (2,))
    rank.rows(3, 0, 2, data([5, 5], [6, 6]))
    rank.end_step({})
    summary = rank.close()
    assert summary.expected["d/late"] == summary.recorded["d/late"] == 2
    table = Capture(folder).table
    assert bytes(table.digest[1, 3]) == xxhash.xxh3_128_digest(data([6, 6]))
    assert [site.name for site in summary.sites] == ["a/all", "b/logits", "c/tokens", "d/late"]


def begun(rank: RankWriter) -> RankWriter:
    """In a step of two rows, the second of which feeds the logits."""
    rank.begin_step(0, ["x"], [2], [1, 2], [0, 1], [1])
    return rank


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_rows_of_any_dtype_and_shape_come_back(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(NUMPY)))
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    count = data.draw(st.integers(1, 3))
    width = itemsize(dtype) * int(np.prod(shape))
    raw = data.draw(st.binary(min_size=width * count, max_size=width * count))
    if dtype == "bool":
        raw = bytes(byte & 1 for byte in raw)
    with tempfile.TemporaryDirectory() as root:
        folder = folder_in(Path(root))
        rank = writer_for(folder, [ALL])
        rank.layout(0, dtype, shape)
        rank.begin_step(0, ["x"], [count], [1, 2, 3][:count], list(range(count)), [0])
        rank.rows(0, 0, count, memoryview(raw))
        rank.end_step({})
        rank.close()
        capture = Capture(folder)
        capture.check()
        for row in range(count):
            stored, expected = capture.row_payload("a/all", row), raw[row * width : (row + 1) * width]
            assert stored is not None
            assert (stored.dtype, stored.shape, stored.tobytes()) == (NUMPY[dtype], shape, expected)
            assert bytes(capture.table.digest[row, 0]) == xxhash.xxh3_128_digest(expected)


def test_sites_come_in_the_order_they_were_seen(folder: Path) -> None:
    sites = [Site(name=name, rows="all") for name in ("a", "b", "c", "d")]
    rank = writer_for(folder, sites)
    rank.begin_step(0, ["x"], [1], [1], [0], [0])
    for site in (2, 0):
        rank.rows(site, 0, 1, data([site, site]))
    rank.end_step({})
    summary = rank.close()
    assert [site.name for site in summary.sites] == ["c", "d", "a", "b"]
    assert list(summary.expected) == ["c", "d", "a", "b"]
    capture = Capture(folder)
    assert [site.name for site in capture.sites] == ["c", "d", "a", "b"]
    assert capture.table.present[:].tolist() == [[True, False, True, False]]


@given(st.data())
def test_execution_order(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 12))
    seen = data.draw(st.permutations(range(count)))[: data.draw(st.integers(0, count))]
    order = execution_order(count, seen)
    assert sorted(order) == list(range(count))
    assert [index for index in order if index in seen] == seen
    for index in set(range(count)) - set(seen):
        where = order.index(index)
        assert order[where - 1] == index - 1 if index else where == 0


def test_the_journal_lists_shards_as_they_are(folder: Path, rank: RankWriter) -> None:
    begun(rank).end_step({})
    rank.close()
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    for line in lines:
        blob = (folder / line["name"]).read_bytes()
        assert (line["size"], line["xxh3_128"]) == (len(blob), xxhash.xxh3_128_hexdigest(blob))
    names = [f"rank-0/{what}-00000.safetensors" for what in ("rows", "digests")]
    assert [line["name"] for line in lines] == names


def test_writers_of_several_ranks_share_the_journal(folder: Path) -> None:
    def add(rank: int) -> None:
        for number in range(100):
            name = f"rank-{rank}/rows-{number:05d}.safetensors"
            append_journal(folder, Shard(name=name, size=number, xxh3_128="0" * 32))

    threads = [threading.Thread(target=add, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [json.loads(line)["name"] for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert len(set(lines)) == len(lines) == 400
    for rank in range(4):
        mine = [name for name in lines if name.startswith(f"rank-{rank}/")]
        assert mine == sorted(mine)


def test_a_journal_line_that_is_cut_off_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(io.FileIO):
        def write(self, blob: Any) -> int:
            return super().write(blob[:3])

    monkeypatch.setattr(Path, "open", lambda self, mode, buffering: Short(self, "ab"))
    with pytest.raises(OSError, match="No space left"):
        append_journal(folder, Shard(name="x", size=0, xxh3_128=""))


# -- rows that a GPU has hashed ---------------------------------------------------------------------------


def test_rows_that_come_as_digests(folder: Path) -> None:
    """One frame may hold rows of both kinds; of those that were hashed there is nothing but the digest."""
    rank = writer_for(folder, keep=False)
    rank.layout(0, "float32", (100,), ROWSUM)
    rank.begin_step(0, ["x"], [2], [1, 2], [0, 1], [1])
    hashed = [bytes([number]) * 16 for number in (1, 2)]
    logits = data([9, 9])
    table = [[0, 0, 2, 16, 16, 0], [1, 0, 1, 8, 8, 32]]
    rank.frame(np.array(table), memoryview(b"".join(hashed) + bytes(logits)))
    rank.end_step({"x": [3]})
    summary = rank.close()
    table_ = Capture(folder).table
    assert [bytes(row) for row in table_.digest[:, 0]] == hashed
    assert bytes(table_.digest[1, 1]) == xxhash.xxh3_128_digest(logits)
    assert [(site.dtype, site.shape, site.digest) for site in summary.sites] == [
        ("float32", (100,), ROWSUM),
        ("float32", (2,), XXH3),
        ("int64", (), XXH3),
    ]


@pytest.mark.parametrize(("keep", "digest"), [(True, ROWSUM), (False, "md5")])
def test_digests_that_are_of_no_use(folder: Path, keep: bool, digest: str) -> None:
    rank = writer_for(folder, keep=keep)
    with pytest.raises(StreamError, match="rows of a/all came as digests"):
        rank.layout(0, "float32", (2,), digest)


def test_a_site_that_changes_its_digest_is_dropped(folder: Path) -> None:
    rank = writer_for(folder, keep=False)
    rank.begin_step(0, ["x"], [1], [1], [0], [0])
    rank.rows(0, 0, 1, data([1, 1]))
    rank.layout(0, "float32", (2,), ROWSUM)
    rank.end_step({})
    assert "a/all changed from" in rank.close().complaints[0]
