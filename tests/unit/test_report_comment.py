"""The comment: the verdict, its evidence and its limits, at any length and whatever the captures hold."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import shutil
import zlib
from pathlib import Path

import golden
import msgspec
import pytest
from builders import Plan, attention, bump
from evidence import HOSTILE_NAME, packed, plans, stable
from hypothesis import given, settings
from hypothesis import strategies as st
from markup import live, parsed, shown

from localizer.diff.result import Difference, Reason
from localizer.report import history
from localizer.report.comment import DROPPED, comment, whole
from localizer.report.parts import Attachment, Evidence
from localizer.report.safe import escaped
from localizer.run.attach import attach
from localizer.run.attached import read
from localizer.store.reader import Capture
from localizer.store.schema import Probe

ROOT = Path(__file__).parents[2]


def visible(text: str) -> str:
    """A comment without what is hidden in it."""
    return history.RECORDS.sub("", text.removeprefix(f"{history.MARKER}\n\n"))


def ours(text: str) -> list[str]:
    """What is live in a comment beside the folds that it makes itself."""
    folds = ("<details>", "<summary>", "</details>")
    left = [it for it in live(visible(text)) if it != "html_block"]
    blocks = [it.content for it in parsed(visible(text)) if it.type == "html_block"]
    return left + [it for it in blocks if not it.startswith(folds)]


def test_the_committed_pair(tmp_path: Path) -> None:
    captures = [Capture(ROOT / "captures" / name / "0001", name) for name in ("candidate", "parent")]
    made = attach(*captures, [], tmp_path / "candidate-parent.zip", limit=25_000_000, redact=True)
    text = whole(read(made.path))
    assert ours(text) == []
    golden.check("comment-committed.md", stable(text))
    digest = hashlib.sha256(made.path.read_bytes()).hexdigest()
    size = made.path.stat().st_size
    assert f"`candidate-parent.zip`, {size:,} bytes, SHA-256 `{digest}`" in text


@pytest.mark.parametrize(
    "name", ["diverged", "identical", "killed", "tokens", "candidate-only", "also-in-control", "draft"]
)
def test_it_is_as_expected(tmp_path: Path, name: str) -> None:
    text = whole(packed(tmp_path, plans(name)))
    assert ours(text) == []
    golden.check(f"comment-{name}.md", stable(text))


def test_hostile_names(tmp_path: Path) -> None:
    text = whole(packed(tmp_path, plans("hostile"), HOSTILE_NAME))
    assert ours(text) == []
    golden.check("comment-hostile.md", stable(text))


def test_verdict_and_attribution_stand_first(tmp_path: Path) -> None:
    lines = visible(whole(packed(tmp_path, plans("candidate-only")))).splitlines()
    assert lines[0] == "## localizer: diverged, not in the control"


PROBED = [
    Probe(target="vllm.v1.worker.block_table:BlockTable.append_row", calls=12, calls_outside_steps=1),
    Probe(target="vllm.x:@octocat", cache="cache", calls=0, calls_outside_steps=0),
]


def test_probes_say_whether_the_changed_code_ran(tmp_path: Path) -> None:
    plan = Plan(manifested={"probes": PROBED})
    text = shown(comment(packed(tmp_path, [plan, dataclasses.replace(plan, name="parent")])))
    for probe in PROBED:
        assert f"Probe in the candidate: {probe.target}" in text


SECRETS = ("zaphod", "heartofgold", "/home")


def test_it_tells_nothing_that_the_archive_hides(tmp_path: Path) -> None:
    plan = Plan(
        engine={"download_dir": "/home/zaphod/models/deep/x"},
        environment={"VLLM_CACHE_ROOT": "/home/zaphod/.cache", "MY_TEAM": "heartofgold"},
        prompts=((101, 102, 103), (4, 105, 106)),
        overlay={"a.py": "ab"},
    )
    made = [dataclasses.replace(plan, name="candidate", engine={"download_dir": "/home/zaphod/other"}),
            dataclasses.replace(plan, name="parent")]  # fmt: skip
    text = whole(packed(tmp_path / "redacted", made))
    assert not [word for word in SECRETS if word in text]
    (told,) = history.read(text) or []
    assert not [word for word in SECRETS if word in str(told)]
    text = whole(packed(tmp_path / "whole", made, redact=False))
    assert [word for word in SECRETS if word in text] == list(SECRETS)


# -- length -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    folder = tmp_path_factory.mktemp("base")
    changed = {(name, 4, attention(1, "query")): bump() for name in ("r01.00", "r01.01")}
    return packed(folder, [Plan(name="candidate", changes=changed), Plan(name="parent")])


def test_details_are_dropped_in_order_and_named(base: Evidence) -> None:
    full = comment(base)
    before: list[str] = []
    for limit in range(len(full.encode()), 2_300, -150):
        text = comment(base, limit)
        assert len(text.encode()) <= limit
        for needed in ("localizer: diverged", "This result establishes", "It does not establish", "x.zip",
                       "SHA-256", "Token parity", "KV cache contents", "Quality of the output"):  # fmt: skip
            assert needed in shown(text), (limit, needed)
        if "Left out, since" in text:
            note = shown(text).partition("a comment has a limit: ")[2].partition(";")[0].split(", ")
            assert note == [name for name in DROPPED if name in note]
            assert before == note[: len(before)]
            before = note
    assert len(before) > 8


def test_too_long(base: Evidence) -> None:
    golden.check("comment-too-long.md", stable(comment(base, 3_600)) + "\n")


LONG = st.text(st.sampled_from("x` @|\\<\u202e\U0001f600é-#1"), max_size=3000)


@settings(deadline=None, max_examples=60)
@given(LONG, st.integers(0, 400), st.integers(0, 3000))
def test_it_always_fits_and_always_has_its_scope(base: Evidence, text: str, many: int, reasons: int) -> None:
    differences = [
        Difference(setting=f"{number}{text}", candidate=text, parent=None) for number in range(many)
    ]
    why = [Reason(code="incomplete", source="candidate", detail=text) for _ in range(reasons)]
    result = msgspec.structs.replace(base.result, differences=differences, reasons=why)
    name = f"{text[:60]}.zip"
    found = dataclasses.replace(base, result=result, attachment=Attachment(name, 3, "ab" * 32))
    made = whole(found, None)
    assert len(made.encode()) <= history.LIMIT
    assert ours(made) == []
    for needed in ("localizer: diverged", "This result establishes", "It does not establish", "ab" * 32):
        assert needed in shown(visible(made))
    assert escaped(name).strip() in shown(visible(made))


# -- earlier verdicts -------------------------------------------------------------------------------------


def told(number: int, text: str = "") -> history.Told:
    return history.Told(
        when=f"2025-01-{number:02}",
        headline=f"diverged: number {number}{text}",
        establishes=[f"What {number}"],
        does_not_establish=["All else"],
        attachment="x.zip",
        sha256=f"{number:064x}",
    )


def body(number: int, before: str | None, newest: str = "new", text: str = "") -> str:
    return history.body(lambda limit: newest[:limit], told(number, text), before)


def test_earlier_verdicts_are_told_below_the_newest_first() -> None:
    one = body(1, None)
    assert "Earlier verdicts" not in one
    three = body(3, body(2, one))
    assert [it.headline for it in history.read(three) or []] == [f"diverged: number {it}" for it in (3, 2, 1)]
    text = shown(three)
    assert text.index("number 2") < text.index("number 1")
    assert f"{1:064x}" in text
    assert "Earlier verdicts: 2" in three


def test_the_same_verdict_of_the_same_archive_is_told_once() -> None:
    assert body(1, body(1, None)) == body(1, None)


def test_the_oldest_are_dropped_where_there_is_no_room() -> None:
    before = None
    for number in range(1, 40):
        before = body(number, before, newest="x" * 60_000, text=f" {number * 'y'}")
        assert len(before.encode()) <= history.LIMIT
    kept = history.read(before or "") or []
    numbers = [int(it.sha256, 16) for it in kept]
    assert numbers == list(range(39, 39 - len(numbers), -1))
    assert 2 < len(numbers) < 39
    assert f"a comment has a limit: {39 - len(numbers)} older" in (before or "")


def test_a_comment_that_takes_all_room_says_that_earlier_verdicts_are_left_out() -> None:
    before = None
    for number in range(1, 6):
        before = history.body(lambda limit: "x" * limit, told(number), before)
        assert len(before.encode()) <= history.LIMIT
        assert (f"a comment has a limit: {number - 1} older" in before) == (number > 1)


def hidden(plain: bytes) -> str:
    return base64.b64encode(zlib.compress(plain)).decode()


@pytest.mark.parametrize(
    "records",
    [
        "",
        "AAAA",
        "!",
        "x" * 9,
        "eJwDAAAAAAE=",
        "eJyLjgUAARUAuQ==",
        "eNoDAAAAAAE=",
        hidden(b'{"told": 3}'),
        hidden(b'{"told": [], "dropped": -1}'),
        hidden(b"[" * 99_999),
        hidden(b'{"told": []}'),
    ],
)
def test_what_cannot_be_read_is_said_to_be_lost(records: str) -> None:
    before = f"{history.MARKER}\nold\n<!-- localizer:records {records} -->"
    found = body(1, before)
    assert [it.headline for it in history.read(found) or []] == ["diverged: number 1"]
    assert ("could not be read" in found) == (history.read(before) is None)


@given(st.text(max_size=200))
def test_hostile_records_are_told_as_text(text: str) -> None:
    clipped = text.encode("utf-8", "backslashreplace").decode()[:200]
    found = body(2, body(1, None, text=clipped))
    assert ours(found) == []
    assert len(history.read(found) or []) == 2


def test_a_bomb_is_not_unpacked() -> None:
    bomb = hidden(b'{"told": [' + b" " * (64 << 20) + b"]}")
    assert history.read(f"<!-- localizer:records {bomb} -->") is None


def test_an_archive_without_its_pair_is_no_evidence(tmp_path: Path) -> None:
    from localizer.errors import LocalizerError
    from localizer.store import pack

    pack.write(tmp_path / "y.zip", {"note.txt": b"x"})
    with pytest.raises(LocalizerError, match="holds no candidate and parent"):
        read(tmp_path / "y.zip")
    shutil.rmtree(tmp_path)
