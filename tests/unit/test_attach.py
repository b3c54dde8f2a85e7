"""An archive says of its captures what the whole ones say, and does not tell what it must not."""

from __future__ import annotations

import hashlib
import json
import random
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from altered import PAYLOAD, column, describe, forge
from builders import Plan, attention, bump, pair, write
from cases import CASES, PARENTS, PROMPTS

from localizer.diff import diff, diff_within
from localizer.diff.control import upstream_rows
from localizer.errors import DamagedCapture, LocalizerError
from localizer.report.json import tree
from localizer.run.attach import Packed, attach
from localizer.store import writer
from localizer.store.archive import Archive
from localizer.store.prefix import prefix_digests
from localizer.store.reader import Capture
from localizer.store.schema import HiddenPrompt
from localizer.store.verify import DAMAGED, SOUND, verify_archive
from localizer.wire import ranks
from localizer.wire.spec import DRAFT, INPUT_IDS, LOGITS, TOKEN

SAME = (
    *("schema", "verdict", "attribution", "workloads_equal", "tokens", "speculation", "summary"),
    *("first", "first_rows", "rows", "requests", "signatures", "histogram", "scope"),
)
"""Parts of a result that must be equal, word for word; others are looked at apart."""


def packed(root: Path, plans: Sequence[Plan], **options: Any) -> tuple[list[Capture], Packed]:
    """Captures and an archive of them: candidate, parent, controls."""
    captures = [Capture(write(root, plan)) for plan in plans]
    given = {"limit": 25_000_000, "redact": True} | options
    return captures, attach(*captures[:2], captures[2:], root / "x.zip", **given)


def loaded(path: Path) -> list[Capture]:
    archive = Archive(path)
    return [archive.load(name) for name in archive.captures]


def check(root: Path, plans: Sequence[Plan], *, redact: bool) -> None:
    """The archive of these captures is sound, and says what they say."""
    captures, made = packed(root, plans, redact=redact)
    assert made.changed == []
    archived = loaded(made.path)
    one, other = (tree(diff(it[0], it[1], it[2:])) for it in (captures, archived))
    for name in SAME:
        assert one[name] == other[name], name
    assert [why["code"] for why in one["reasons"]] == [why["code"] for why in other["reasons"]]
    for name in ("rows", "sites", "pairs", "layers", "model_files_equal", "weights_equal"):
        assert one["coverage"][name] == other["coverage"][name], name
    hidden = ("rows_read", "class", "max_ulp")
    for mine, theirs in zip(one["sites"], other["sites"], strict=True):
        if redact and ranks.base(mine["site"]) in (INPUT_IDS, TOKEN):
            mine, theirs = ({k: v for k, v in it.items() if k not in hidden} for it in (mine, theirs))
        assert mine == theirs
    if one["controls"] is not None:
        places = ("captures", "requests", "sites")
        for name in places:
            for mine, theirs in zip(one["controls"][name], other["controls"][name], strict=True):
                free = ("path", "unfit")
                assert {k: v for k, v in mine.items() if k not in free} == {
                    k: v for k, v in theirs.items() if k not in free
                }
        codes = [
            [[why["code"] for why in it["unfit"]] for it in result["controls"]["captures"]]
            for result in (one, other)
        ]
        assert codes[0] == codes[1]
    settings = [[item["setting"] for item in result["differences"]] for result in (one, other)]
    assert settings[0] == settings[1]
    stored = json.loads(zipfile.ZipFile(made.path).read("result.json"))
    assert {name: stored[name] for name in SAME} == {name: other[name] for name in SAME}
    assert verify_archive(made.path).state != DAMAGED
    whole, left = (tree(diff_within(it[0])) for it in (captures, archived))
    for name in ("verdict", "tokens", "histogram", "speculation"):
        assert whole[name] == left[name], name


def cases() -> Iterator[tuple[str, list[Plan]]]:
    """The pairs that reports are shown on, and those with controls."""
    for name, (plan, changes) in CASES.items():
        yield name, [replace(plan, name="candidate", **changes), replace(plan, name="parent")]
    for name, (changes, controls) in PARENTS.items():
        further = [Plan(**{"name": f"parent-{number}"} | more) for number, more in enumerate(controls, 2)]
        yield name, [Plan(**{"name": "candidate"} | changes), Plan(name="parent"), *further]


@pytest.mark.parametrize("redact", [True, False], ids=["redacted", "whole"])
@pytest.mark.parametrize("name", [name for name, _ in cases()])
def test_it_says_the_same(tmp_path: Path, name: str, redact: bool) -> None:
    check(tmp_path, dict(cases())[name], redact=redact)


def drawn(seed: int) -> list[Plan]:
    """Captures of any shape with any faults."""
    rng = random.Random(seed)
    speculate = rng.choice((0, 0, 2, 3))
    base = Plan(
        name="parent",
        layers=rng.randint(1, 4),
        prompts=rng.choice((PROMPTS, ((1, 2, 3), (1, 2, 3), (1, 2)), ((5,), (5, 6, 7, 8), (9, 1)))),
        matrix=rng.choice(((1, 2), (3,), (1, 3, 1))),
        repeats=rng.randint(1, 2),
        max_tokens=rng.randint(1, 7),
        chunk=rng.choice((None, 1, 2)) if not speculate else None,
        speculate=speculate,
        method=rng.choice(("eagle3", "eagle", "ngram")),
        traced=rng.random() < 0.5,
        manifest=rng.random() < 0.9,
        ranks=rng.choice((1, 1, 2)),
    )
    names = [site.name for site in base.sites()]
    base = replace(
        base, payload=rng.choice((None, frozenset(), frozenset(rng.sample(names, len(names) // 2))))
    )
    plans = []
    for name in ("candidate", "parent", "parent-2")[: rng.randint(2, 3)]:
        changes, outputs = {}, {}
        for _ in range(rng.choice((0, 1, 4)) if name != "parent" else 0):
            site = rng.choice([site for site in base.sites() if not site.dtype.startswith("int")])
            element = tuple(rng.randrange(size) for size in site.shape or ())
            step = rng.randint(1, speculate) if site.name.startswith(DRAFT) else 0
            at = f"{site.name}@{step}" if step else site.name
            where = rng.choice(base.requests), rng.randrange(base.max_tokens + 3), at
            changes[where] = bump(element, rng.randint(1, 9))
        if rng.random() < 0.4:
            request = rng.choice(base.requests)
            tokens = base.tokens(request)
            tokens[rng.randrange(len(tokens))] = rng.randrange(16)
            outputs[request] = tokens
        plans.append(
            replace(
                base,
                name=name,
                changes=changes,
                outputs=outputs if not speculate else {},
                matrix=(2, *base.matrix) if rng.random() < 0.2 else base.matrix,
            )
        )
    return plans


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(it, marks=pytest.mark.slow) for it in range(10, 60))]
)
def test_it_says_the_same_of_any_captures(tmp_path: Path, seed: int) -> None:
    with mock.patch.object(writer, "SHARD_ROWS", random.Random(seed).choice((4, 4096))):
        check(tmp_path, drawn(seed), redact=bool(seed % 4))


def test_a_hidden_prompt_still_tells_who_computed_cached_positions(tmp_path: Path) -> None:
    """Those that a request took from the prefix cache have rows only of other requests."""
    captures, made = packed(tmp_path, [Plan(matrix=(1, 1)), Plan(name="parent", matrix=(1, 1))])
    found = []
    for capture in (captures[0], loaded(made.path)[0]):
        table = capture.table
        keep = ~((table.columns["request"] == 1) & (table.columns["position"] < 2))
        capture.table = replace(
            table,
            columns={name: column[keep] for name, column in table.columns.items()},
            prefix=table.prefix[keep],
            digest=table.digest[keep],
            present=table.present[keep],
        )
        columns = capture.table.columns
        row = int(((columns["request"] == 1) & (columns["position"] == 4)).nonzero()[0][0])
        rows = upstream_rows(capture, row)
        found.append(
            list(zip(columns["request"][rows].tolist(), columns["position"][rows].tolist(), strict=True))
        )
    assert found == [[(0, 0), (0, 1), (1, 2), (1, 3)]] * 2


# -- what is told -----------------------------------------------------------------------------------------

HOME = "/home/zaphod/models/secret-llama"
SECRET = Plan(
    prompts=((101, 102, 103), (4, 105, 106), (107, 8, 109)),
    matrix=(1, 3),
    traced=True,
    engine={"download_dir": "/mnt/zaphod/cache", "nested": {"path": "C:\\Users\\zaphod\\x"}},
    outputs={name: [3, 3, 3, 3] for name in ("r00.00", "r01.00", "r01.02")},
    environment={"VLLM_CACHE_ROOT": "/home/zaphod/.cache", "VLLM_HOST_IP": "10.0.0.7", "MY_TEAM": "vogons"},
    running={"note": "file:///home/zaphod/a and ~zaphod/b, tokens/s, and/or"},
    manifested={"config": {"model_config": {"model": HOME, "served": "on heartofgold as zaphod"}}},
)
CHANGED = {("r01.01", 4, attention(1, "query")): bump((1, 2))}


def secret(root: Path, **options: Any) -> tuple[list[Capture], Packed]:
    folders = pair(root, SECRET, changes=CHANGED)
    for folder in folders:
        path = folder / "open.json"
        document = json.loads(path.read_text())
        document["host"]["name"] = "heartofgold"
        document["source"]["python"] = "/home/zaphod/venv/bin/python"
        path.write_text(json.dumps(document))
        (folder / "log.txt").write_text("zaphod was here")
        describe(folder)
    captures = [Capture(folder) for folder in folders]
    return captures, attach(*captures, [], root / "x.zip", **{"limit": 25_000_000, "redact": True} | options)


def everything(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return b"\n".join(archive.read(name) for name in archive.namelist())


def test_no_name_no_path_and_no_log_is_told(tmp_path: Path) -> None:
    _, made = secret(tmp_path)
    text = everything(made.path)
    for word in (b"zaphod", b"heartofgold", b"vogons", b"MY_TEAM", b"10.0.0.7", b"/home", b"Users", b"/mnt"):
        assert word not in text, word
    assert b"secret-llama" in text  # the last part of a deep path says what it was
    assert b"tokens/s, and/or" in text
    _, made = secret(tmp_path / "whole", redact=False)
    text = everything(made.path)
    for word in (b"zaphod was here", b"heartofgold", b"vogons"):
        assert word in text, word


def test_no_token_is_told_but_what_the_witness_generated(tmp_path: Path) -> None:
    originals, made = secret(tmp_path)
    assert made.result.first is not None
    witness = made.result.first.request
    assert witness == "r01.01"
    for original, capture in zip(originals, loaded(made.path), strict=True):
        assert all(isinstance(prompt, HiddenPrompt) for prompt in capture.open.workload.prompts)
        for request in capture.requests:
            told = capture.outputs[request] == original.outputs[request]
            assert told == (request == witness)
            assert told or min(capture.outputs[request]) > 1 << 32
        columns, old = capture.table.columns, original.table.columns
        row = columns["request"] == capture.requests.index(witness)
        generated = row & (columns["position"] >= 3)
        assert (columns["token"][generated] == old["token"][generated]).all()
        assert (columns["token"][~generated] == -1).all()
        decided = columns["sampled"] >= 0
        assert (columns["sampled"][decided & row] == old["sampled"][decided & row]).all()
        assert (columns["sampled"][decided & ~row] > 1 << 32).all()
        hidden = [token for it in capture.requests if it != witness for token in capture.outputs[it]]
        prompts = {capture.prompts[it] for it in capture.requests if it != witness}
        assert len(set(hidden)) == SECRET.max_tokens * len(prompts)  # equal tokens elsewhere do not show


def test_no_digest_can_be_tried_out(tmp_path: Path) -> None:
    """A prefix, or the digest of an input id, is that of few numbers: who tries all tokens would find it."""
    originals, made = secret(tmp_path)
    for original, capture in zip(originals, loaded(made.path), strict=True):
        assert len(capture.table) == len(original.table)
        assert not (capture.table.prefix == original.table.prefix).all(axis=1).any()
        names = [site.name for site in capture.sites]
        told = capture.table.columns["token"] >= 0
        for site, same in ((INPUT_IDS, told), (TOKEN, None)):
            column = names.index(site)
            equal = (capture.table.digest[:, column] == original.table.digest[:, column]).all(axis=1)
            equal &= capture.table.present[:, column]
            if same is not None:
                assert (equal == same).all()
            assert capture.payload[site] == int(equal.sum())
        prompt = capture.prompts["r00.00"]
        assert isinstance(prompt, HiddenPrompt)
        assert prompt.table().tobytes() != prefix_digests((101, 102, 103))
        kept = sum(capture.payload.values())
        assert 0 < kept < sum(original.payload.values())
        for column, site in enumerate(capture.sites):  # what is not kept has no digest of its bytes
            equal = (capture.table.digest[:, column] == original.table.digest[:, column]).all(axis=1)
            stored = {
                capture.table.digest[row, column].tobytes()
                for row in range(len(capture.table))
                if capture.row_payload(site.name, row) is not None
            }
            for row in (equal & capture.table.present[:, column]).nonzero()[0]:
                assert capture.table.digest[row, column].tobytes() in stored


def test_no_token_of_any_rank_can_be_tried_out(tmp_path: Path) -> None:
    plan = replace(SECRET, ranks=2)
    changes = {("r01.01", 4, f"{attention(1, 'query')}[1/2]"): bump((1, 2))}
    originals = [Capture(folder) for folder in pair(tmp_path, plan, changes=changes)]
    made = attach(*originals, [], tmp_path / "x.zip", limit=25_000_000, redact=True)
    for original, capture in zip(originals, loaded(made.path), strict=True):
        told = capture.table.columns["token"] >= 0
        assert told.any()
        for site in (INPUT_IDS, f"{INPUT_IDS}@1", TOKEN, f"{TOKEN}@1"):
            column = [found.name for found in capture.sites].index(site)
            equal = (capture.table.digest[:, column] == original.table.digest[:, column]).all(axis=1)
            equal &= capture.table.present[:, column]
            assert site.startswith(TOKEN) or (equal == told).all()
            assert capture.payload[site] == int(equal.sum()) < int(capture.table.present[:, column].sum())


def test_the_records_say_what_was_taken_from_what(tmp_path: Path) -> None:
    originals, made = secret(tmp_path)
    for name, original, capture in zip(made.left_out, originals, loaded(made.path), strict=True):
        reduced = capture.open.reduced
        assert reduced is not None
        manifest = (original.folder / "manifest.json").read_bytes()
        assert (reduced.of, reduced.manifest) == (original.label, hashlib.sha256(manifest).hexdigest())
        assert reduced.left_out == made.left_out[name]
        assert "prompts" in reduced.left_out
        assert capture.complete
        assert original.open.reduced is None
    assert verify_archive(made.path).state == SOUND


def test_nothing_is_said_to_be_missing_where_nothing_is(tmp_path: Path) -> None:
    originals, made = secret(tmp_path, redact=False)
    assert made.left_out == {"candidate": [], "parent": []}
    for original, capture in zip(originals, loaded(made.path), strict=True):
        for file in ("open.json", "manifest.json", *(file.name for file in original.files)):
            assert (capture.folder / file).read_bytes() == (original.folder / file).read_bytes()


@pytest.mark.parametrize("redact", [True, False])
def test_the_same_captures_give_the_same_bytes(tmp_path: Path, redact: bool) -> None:
    captures, made = secret(tmp_path, redact=redact)
    again = attach(*captures, [], tmp_path / "other.zip", limit=25_000_000, redact=redact)
    assert made.path.read_bytes() == again.path.read_bytes()
    assert made.sha256 == hashlib.sha256(again.path.read_bytes()).hexdigest() == again.sha256
    assert made.size == len(again.path.read_bytes())


def test_captures_that_were_not_redacted_together_are_not_compared(tmp_path: Path) -> None:
    originals, made = secret(tmp_path)
    first = loaded(made.path)
    _, other = packed(tmp_path / "more", [SECRET, replace(SECRET, name="parent", repeats=2)])
    for left, right in ((first[0], loaded(other.path)[1]), (first[0], originals[1])):
        with pytest.raises(LocalizerError, match="were not redacted together"):
            diff(left, right)
    with pytest.raises(LocalizerError, match="is redacted already; attach the original"):
        attach(*first, [], tmp_path / "again.zip", limit=25_000_000, redact=True)
    again = attach(*first, [], tmp_path / "again.zip", limit=25_000_000, redact=False)
    assert again.left_out == {"candidate": [], "parent": []}


# -- limits -----------------------------------------------------------------------------------------------

WIDE = Plan(
    layers=2,
    prompts=PROMPTS,
    matrix=(1, 3),
    max_tokens=20,
    layouts={LOGITS: ("float32", (3000,)), attention(1, "query"): ("bfloat16", (64, 32))},
)


def test_payload_is_left_out_where_there_is_no_room_and_the_divergent_rows_last(tmp_path: Path) -> None:
    plans = [
        replace(WIDE, changes={("r01.02", 5, attention(1, "query")): bump((3, 1))}),
        replace(WIDE, name="parent"),
    ]
    sizes = []
    for number, limit in enumerate((25_000_000, 300_000, 60_000)):
        captures, made = packed(tmp_path / str(number), plans, limit=limit, redact=False)
        assert made.size <= limit
        assert made.changed == []  # the rows that the diff reads are there
        archived = loaded(made.path)
        assert all(capture.complete for capture in archived)
        assert verify_archive(made.path).state == SOUND
        sizes.append([sum(capture.payload.values()) for capture in archived])
        first = made.result.first
        assert first is not None
        assert first.elements_differ == 1
        if number == 1:  # neighbours: the same row at other sites
            columns = archived[0].table.columns
            of_request = columns["request"] == archived[0].requests.index("r01.02")
            (row,) = np.flatnonzero(of_request & (columns["position"] == 5)).tolist()
            for capture in archived:
                assert capture.row_payload(attention(1, "key"), row) is not None
        left_out = [f"payload of {sum(it.payload.values()) - n:,} of {sum(it.payload.values()):,} stored rows"
                    for it, n in zip(captures, sizes[-1], strict=True)]  # fmt: skip
        assert [made.left_out[name] for name in ("candidate", "parent")] == (
            [[], []] if number == 0 else [[text] for text in left_out]
        )
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("redact", [True, False])
def test_digests_around_the_differences_are_left_where_there_are_too_many(
    tmp_path: Path, redact: bool
) -> None:
    plan = Plan(layers=6, prompts=PROMPTS, matrix=(1, 3, 3), max_tokens=30)
    changes = {
        ("r01.02", 20, attention(3, "query")): bump((1, 1)),
        ("r02.00", 9, attention(1, "key")): bump(),
    }
    captures, made = packed(
        tmp_path, [replace(plan, changes=changes), replace(plan, name="parent")], limit=120_000, redact=redact
    )
    assert made.size <= 120_000
    archived = loaded(made.path)
    kept = []
    for name, capture in zip(made.left_out, archived, strict=True):
        assert not capture.complete
        assert "were left out of this archive" in capture.reasons[0]
        assert any(what.startswith("digests of ") for what in made.left_out[name])
        kept.append(capture.table.present[:, 0])
        assert 0 < kept[-1].sum() < len(capture.table) == len(captures[0].table)
    assert (kept[0] == kept[1]).all()
    assert verify_archive(made.path).state == "incomplete"
    whole = diff(*captures)
    assert (made.result.verdict, whole.verdict) == ("diverged", "diverged")
    assert made.result.tokens == whole.tokens
    assert whole.first is not None
    assert made.result.first is not None
    for name in ("request", "position", "step", "site", "segment", "elements_differ"):
        assert getattr(made.result.first, name) == getattr(whole.first, name)
    assert "coverage" in made.changed
    if not redact:  # of other requests a redacted one keeps only what the diff reads
        assert all(sum(capture.payload.values()) > 8 for capture in archived)


def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(LocalizerError, match="even without payload, more than 9,000; raise --limit"):
        packed(tmp_path, [Plan(), Plan(name="parent")], limit=9_000)
    assert not list(tmp_path.glob("*.zip"))


def test_a_damaged_capture_is_not_packed(tmp_path: Path) -> None:
    """Also where the diff does not look: at a stored row that is equal on both sides."""
    folders = pair(tmp_path, Plan())
    array = np.array(column(folders[0], PAYLOAD, attention(2, "key")))
    array[0] = -array[0]
    forge(folders[0], PAYLOAD, arrays={attention(2, "key"): array})
    with pytest.raises(DamagedCapture, match="does not have its digest"):
        attach(*(Capture(folder) for folder in folders), [], tmp_path / "x.zip", limit=10**7, redact=False)
    assert not (tmp_path / "x.zip").exists()


def test_names_that_are_words_of_the_records(tmp_path: Path) -> None:
    plan = Plan(
        running={"home": "/home/vllm/x"},
        manifested={
            "code": {attention(1, "query"): "vllm/models/llama.py:3 f", attention(1, "key"): "/opt/x.py:3 g"}
        },
    )
    captures, made = packed(tmp_path, [replace(plan, changes=CHANGED), replace(plan, name="parent")])
    assert captures[0].manifest is not None
    first = made.result.first
    assert first is not None
    assert first.segment.before_code == "vllm/models/llama.py:3 f"
    assert b"/opt" not in everything(made.path)
    folders = pair(tmp_path / "x", Plan(state="incomplete"), manifested={"intervention": None})
    for folder in folders:
        path = folder / "open.json"
        document = json.loads(path.read_text())
        document["host"]["name"] = "patch"
        document["intervention"] = {"kind": "patch", "phases": ["A1"], "repeats": 1}
        path.write_text(json.dumps(document))
        describe(folder)
    with pytest.raises(LocalizerError, match="is called as a word of the records"):
        attach(*map(Capture, folders), [], tmp_path / "y.zip", limit=10**7, redact=True)
