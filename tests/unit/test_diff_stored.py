"""Stored rows are read where they are needed only, and with `--payload` all of them, byte for byte."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from altered import DIGESTS, PAYLOAD, column, describe, forge, small
from builders import Plan, attention, bump, pair, write
from hypothesis import given, settings
from hypothesis import strategies as st

from localizer.diff import diff, stored
from localizer.diff.result import StoredCoverage
from localizer.diff.stored import runs
from localizer.errors import DamagedCapture
from localizer.store import tensors, writer
from localizer.store.reader import Capture
from localizer.store.schema import ROW_INDEX
from localizer.store.verify import verify

QUERY, OUTPUT = attention(1, "query"), attention(1, "output")
CHANGES = {("r01.01", 4, QUERY): bump(), ("r01.01", 4, OUTPUT): bump(), ("r01.00", 2, OUTPUT): bump()}
ROOT = Path(__file__).parents[2]

Read = list[tuple[str, str, int, int]]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """What is read of payload files behind their headers: (capture, tensor, first row, rows)."""
    found: Read = []
    mapped, whole = tensors.TensorFile._mapped, tensors.file_digest

    def spy(self: tensors.TensorFile, begin: int, end: int) -> np.ndarray:
        if "payload" in self.path.name:
            for name in self.names():
                first, last = self.span(name)
                if first <= begin < last:
                    width = self.row_bytes(name)
                    found.append(
                        (self.path.parts[-4], name, (begin - first) // width, (end - begin) // width)
                    )
        return mapped(self, begin, end)

    def hashed(path: Path) -> str:
        if "payload" in path.name:
            found.append((path.parts[-4], "", 0, path.stat().st_size))
        return whole(path)

    monkeypatch.setattr(tensors.TensorFile, "_mapped", spy)
    monkeypatch.setattr(tensors, "file_digest", hashed)
    return found


def captures(root: Path, plan: Plan | None = None, **candidate: Any) -> tuple[Capture, Capture]:
    one, other = pair(root, plan, **candidate)
    return Capture(one), Capture(other)


# -- what is read -----------------------------------------------------------------------------------------


def test_with_equal_digests_no_payload_is_read(tmp_path: Path, read: Read) -> None:
    both = captures(tmp_path)
    read.clear()
    assert diff(*both).verdict == "identical"
    assert read == []


def test_with_different_digests_only_their_rows_are_read(tmp_path: Path, read: Read) -> None:
    both = captures(tmp_path, changes=CHANGES)
    digests = [capture.table.digest[:] for capture in both]
    names = [site.name for site in both[0].sites]
    different = np.argwhere((digests[0] != digests[1]).any(axis=2)).tolist()
    rows = sorted((names[site], row, 1) for row, site in different)
    read.clear()
    diff(*both)
    assert len(rows) == 3
    for name in ("candidate", "parent"):
        there = [entry[1:] for entry in read if entry[0] == name and not entry[1].endswith(ROW_INDEX)]
        assert sorted(set(there)) == rows


def test_verify_reads_all(tmp_path: Path, read: Read) -> None:
    verify(small(tmp_path))
    assert {entry[1] for entry in read} > {"", attention(0, "query")}


def test_nothing_stays_mapped_or_open(tmp_path: Path) -> None:
    capture = Capture(small(tmp_path))
    kept = capture.row_payload(attention(0, "query"), 3)
    assert "payload" in Path("/proc/self/maps").read_text()  # as long as the row is in use
    opened = len(os.listdir("/proc/self/fd"))
    del kept
    assert str(tmp_path) + "/candidate/0001/rank-0/payload" not in Path("/proc/self/maps").read_text()
    for row in range(9):
        capture.row_payload(attention(0, "query"), row)
        _ = capture.table.digest[row], capture.table.present[row]
    assert len(os.listdir("/proc/self/fd")) <= opened


# -- byte for byte ----------------------------------------------------------------------------------------


def by_hand(candidate: Capture, parent: Capture) -> StoredCoverage:
    """What `compare_stored` should find, row by row."""
    from localizer.diff.align import align

    alignment = align(candidate, parent)
    pairs = differ = size = 0
    for site in alignment.sites:
        for row, other in zip(alignment.candidate, alignment.parent, strict=True):
            rows = candidate.row_payload(site, int(row)), parent.row_payload(site, int(other))
            if rows[0] is not None and rows[1] is not None:
                pairs += 1
                differ += rows[0].tobytes() != rows[1].tobytes()
                size += rows[0].nbytes
    return StoredCoverage(pairs=pairs, differ=differ, bytes=size)


@pytest.mark.parametrize("size", [1, 40, 1 << 20])
@pytest.mark.parametrize("rows", [1, 4, 4096])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"changes": CHANGES},
        {"matrix": (2, 1)},
        {"chunk": 2},
        {"payload": frozenset({QUERY})},
        {"payload": frozenset()},
        {"layers": (1,)},
    ],
    ids=["equal", "changed", "other matrix", "chunked", "only queries kept", "nothing kept", "one layer"],
)
def test_every_pair_that_both_kept_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], rows: int, size: int
) -> None:
    """Whatever sets the rows lie in, in whatever order, and however they are cut into blocks."""
    monkeypatch.setattr(stored, "BLOCK_BYTES", size)
    monkeypatch.setattr(stored, "TASK_BYTES", 3 * size)
    other = write(tmp_path, Plan(name="parent"))
    monkeypatch.setattr(writer, "SHARD_ROWS", rows)
    both = Capture(write(tmp_path, replace(Plan(), **changes))), Capture(other)
    result = diff(*both, payload=True)
    assert result.coverage.stored == by_hand(*both)
    assert result.coverage.stored.differ == result.coverage.pairs.differ
    if not changes:
        assert result.coverage.stored.pairs == result.coverage.pairs.compared
    assert diff(both[1], both[0], payload=True).coverage.stored == result.coverage.stored
    assert diff(*both).coverage.stored is None


def test_rows_of_other_layouts_are_not_compared_byte_for_byte(tmp_path: Path) -> None:
    both = captures(tmp_path, layouts={QUERY: ("float32", (6,)), OUTPUT: ("float16", (8,))})
    result = diff(*both, payload=True)
    assert result.verdict == "diverged"
    assert result.coverage.stored is not None
    assert result.coverage.stored.pairs == result.coverage.pairs.compared - 2 * 18
    assert result.coverage.stored.differ == 0


def test_what_is_not_comparable_is_not_compared(tmp_path: Path) -> None:
    both = captures(tmp_path, Plan(model_files={"a": "b"}), model_files={"a": "c"})
    assert diff(*both, payload=True).coverage.stored is None


def another_byte(folder: Path) -> None:
    """Change a byte of a stored row and leave its digest."""
    rows = column(folder, PAYLOAD, QUERY)
    rows.view(np.uint8).reshape(-1)[-1] ^= 1
    forge(folder, PAYLOAD, arrays={QUERY: rows})


def another_digest(folder: Path) -> None:
    """Change a digest and leave the row."""
    digest = column(folder, DIGESTS, "digest")
    digest[-1, 2] ^= 1
    forge(folder, DIGESTS, arrays={"digest": digest})


def not_present(folder: Path) -> None:
    """Say that rows were not recorded which were kept."""
    present = column(folder, DIGESTS, "present")
    present[0, 0] = 0
    forge(folder, DIGESTS, arrays={"present": present})


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("alter", "without"), [(another_byte, "identical"), (not_present, "inconclusive"), (another_digest, None)]
)
def test_bytes_that_do_not_have_their_digest_are_damage(
    tmp_path: Path, alter: Callable[[Path], None], without: str | None, side: int
) -> None:
    """The capture that is damaged is named; without payload only what is read is found."""
    folders = pair(tmp_path)
    alter(folders[side])
    assert verify(folders[side]).state == "damaged"
    both = [Capture(folder) for folder in folders]
    if without is None:
        with pytest.raises(DamagedCapture, match=f"{folders[side].parent.name}.*does not have its digest"):
            diff(*both)
    else:
        assert diff(*both).verdict == without
    with pytest.raises(
        DamagedCapture, match=f"{folders[side].parent.name}.*does not have its digest"
    ) as caught:
        diff(*both, payload=True)
    assert str(caught.value).isprintable()


def test_the_same_damage_on_both_sides_shows_no_difference(tmp_path: Path) -> None:
    """Nothing was asked of digests but whether they are equal: `verify` computes them."""
    folders = pair(tmp_path)
    for folder in folders:
        another_byte(folder)
    result = diff(*map(Capture, folders), payload=True)
    assert (result.verdict, result.coverage.pairs.differ) == ("identical", 0)
    assert [verify(folder).state for folder in folders] == ["damaged", "damaged"]


def test_a_file_that_became_shorter_is_one_sentence(tmp_path: Path) -> None:
    both = captures(tmp_path)
    for capture in both:
        capture.check(payload=False)
    path = both[1].folder / PAYLOAD
    os.truncate(path, path.stat().st_size - 100)
    both[1].check = lambda *, payload=True: None  # type: ignore[method-assign, assignment]
    with pytest.raises(DamagedCapture, match="cannot be read"):
        diff(*both, payload=True)


def test_the_command(tmp_path: Path) -> None:
    pair(tmp_path / "captures", changes=CHANGES)
    command = [sys.executable, "-m", "localizer", "diff", "candidate", "parent", "--payload"]
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = subprocess.run([*command, "--format", "json"], cwd=tmp_path, capture_output=True, text=True)
    assert (text.returncode, found.returncode, text.stderr, found.stderr) == (1, 1, "", "")
    cover = json.loads(found.stdout)["coverage"]
    assert cover["stored"] == {"pairs": cover["pairs"]["compared"], "differ": 3, "bytes": 3912}
    assert "compared byte for byte too: 288 row × site pairs (3,912 bytes a side), 3 of them" in text.stdout


INDICES = st.lists(st.integers(0, 12), unique=True)


@settings(deadline=None)
@given(INDICES.map(sorted), INDICES.map(sorted), st.lists(st.integers(0, 12), unique=True), st.randoms())
def test_runs_are_all_pairs_that_both_kept(
    kept: list[int], other_kept: list[int], rows: list[int], rng: Any
) -> None:
    rows.sort()
    others = rng.sample(range(13), len(rows))
    ours, theirs = np.array(kept, np.int64), np.array(other_kept, np.int64)
    pairs = np.arange(100, 100 + len(rows))
    found = runs(ours, theirs, np.array(rows, np.int64), np.array(others, np.int64), pairs)
    single = [(a + i, b + i, int(p)) for a, b, run in found for i, p in enumerate(run)]
    expected = [
        (kept.index(row), other_kept.index(other), int(p))
        for row, other, p in zip(rows, others, pairs, strict=True)
        if row in kept and other in other_kept
    ]
    assert single == expected
    for (a, b, run), (c, d, _) in itertools.pairwise(found):
        assert (c, d) != (a + len(run), b + len(run))  # as long as they can be


# -- memory -----------------------------------------------------------------------------------------------


def synthetic() -> ModuleType:
    """The writer of captures of any size."""
    spec = importlib.util.spec_from_file_location("synthetic", ROOT / "benchmarks" / "synthetic.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


LIMITED = """
import re, resource, sys
from pathlib import Path
import localizer.cli.diff, localizer.diff.stored, localizer.report.text
from localizer.diff import diff
from localizer.store.reader import Capture
now = 1024 * int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
room = now + (100 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (room, room))
result = diff(*(Capture(Path(path)) for path in sys.argv[2:]), payload=sys.argv[1] == "payload")
print(result.verdict, result.coverage.pairs.compared)
"""


def test_memory_does_not_grow_with_digests_or_payload(tmp_path: Path) -> None:
    """Digests of 160 MB and payload of 650 MB, all of it holes, in 100 MB of anonymous memory."""
    size = synthetic().Size(rows=40_000, kept=1, holes=True)
    folders = [synthetic().write(tmp_path, name, size) for name in ("candidate", "parent")]
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("payload-*")) < 4 << 20
    for payload in ("digests", "payload"):
        command = [sys.executable, "-c", LIMITED, payload, *map(str, folders)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout == f"identical {40_000 * 128}\n", done.stderr


def test_synthetic_captures_are_sound(tmp_path: Path) -> None:
    for name, more in (("real", {}), ("holes", {"holes": True})):
        folder = synthetic().write(tmp_path, name, synthetic().Size(rows=5, layers=2, kept=3, **more))
        assert verify(folder).state == "sound"
        describe(folder)
        assert len(Capture(folder).payload) == 3
