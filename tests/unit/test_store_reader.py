"""A capture is read as it was written, and one that contradicts itself is refused in one sentence."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered import DIGESTS, PAYLOAD, ROWS, SMALL, column, edit, forge, small
from builders import Plan, attention, pair, toy_row, write
from fuzz import recipes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localizer.errors import DamagedCapture, NotACapture
from localizer.store import schema, tensors, writer
from localizer.store.digest import XXH3, row_digest
from localizer.store.prefix import prefix_digest
from localizer.store.reader import Capture
from localizer.store.verify import INCOMPLETE, SOUND, verify
from localizer.wire.rowsum import ROWSUM
from localizer.wire.spec import TOKEN

QUERY = attention(0, "query")

fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small(tmp_path)


# -- what was written is read -----------------------------------------------------------------------------


def test_rows_are_those_of_the_plan(folder: Path) -> None:
    capture = Capture(folder)
    table = capture.table
    texts = {name: [*SMALL.prompt(name), *SMALL.tokens(name)] for name in SMALL.requests}
    rows = list(zip(*(table.columns[name] for name in ("request", "position", "token")), strict=True))
    assert sorted(rows) == [
        (number, position, texts[name][position])
        for number, name in enumerate(SMALL.requests)
        for position in range(3)
    ]
    for row, (number, position, _) in enumerate(rows):
        known = texts[SMALL.requests[number]][: position + 1]
        assert bytes(table.prefix[row]) == prefix_digest(known)
        for site in SMALL.sites():
            stored = capture.row_payload(site.name, row)
            index = [found.name for found in capture.sites].index(site.name)
            assert (stored is not None) == table.present[row, index]
            if stored is not None and site.rows != "tokens":
                assert stored.tobytes() == toy_row(known, site).tobytes()


def test_what_is_known_without_rows(folder: Path) -> None:
    capture = Capture(folder)
    assert capture.label == "candidate/0001"
    assert (capture.complete, capture.reasons) == (True, [])
    assert capture.requests == ["r00.00", "r01.00", "r01.01"]
    assert capture.prompts == {"r00.00": [1, 2], "r01.00": [1, 2], "r01.01": [3, 4]}
    assert capture.outputs == {name: SMALL.tokens(name) for name in SMALL.requests}
    assert [site.name for site in capture.sites] == [site.name for site in SMALL.sites()]
    assert capture.row_payload(QUERY, 10_000) is None
    assert capture.row_payload("nothing", 0) is None
    capture.check()


def test_a_killed_run_gives_what_it_has(tmp_path: Path) -> None:
    whole, killed = Capture(small(tmp_path)), Capture(small(tmp_path, name="killed", manifest=False))
    killed.check()
    assert not killed.complete
    assert "no manifest" in killed.reasons[0]
    assert killed.outputs == whole.outputs
    assert killed.sites == whole.sites
    assert np.array_equal(killed.table.digest, whole.table.digest)


def test_a_run_killed_before_its_first_shard(tmp_path: Path) -> None:
    capture = Capture(write(tmp_path, Plan(manifest=False, only_tokens=True)))
    capture.check()
    assert (len(capture.table), capture.sites, capture.outputs, capture.payload) == (0, [], {}, {})


def test_a_run_killed_between_the_shards_of_a_set(tmp_path: Path) -> None:
    """Rows without digests, then rows and digests without payload."""
    folder = small(tmp_path, manifest=False)
    journal = folder / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    for count, rows in ((0, 0), (1, 0), (2, 9), (3, 9)):
        journal.write_text("".join(lines[:count]))
        capture = Capture(folder)
        capture.check()
        assert len(capture.table) == rows
        assert bool(capture.payload) == (count == 3)


def test_only_tokens(tmp_path: Path) -> None:
    capture = Capture(write(tmp_path, Plan(only_tokens=True)))
    capture.check()
    assert capture.complete
    assert len(capture.outputs) == 3


def test_shards_with_another_order_of_sites_are_joined(tmp_path: Path) -> None:
    """The order of execution is known only when every site was seen; earlier shards may have another one."""
    folder = small(tmp_path)
    table = Capture(folder).table
    before = table.digest[:], table.present[:]
    facts = json.loads(tensors.TensorFile(folder / DIGESTS).metadata)
    facts["sites"].reverse()
    packed, count = column(folder, DIGESTS, "present"), len(facts["sites"])
    present = np.unpackbits(packed, axis=1, count=count, bitorder="little")
    forge(
        folder,
        DIGESTS,
        arrays={
            "digest": column(folder, DIGESTS, "digest")[:, ::-1],
            "present": np.packbits(present[:, ::-1], axis=1, bitorder="little"),
        },
        metadata=json.dumps(facts),
    )
    after = Capture(folder).table
    assert np.array_equal(after.digest, before[0])
    assert np.array_equal(after.present, before[1])


def test_unknown_keys_are_left_alone(folder: Path) -> None:
    edit(folder, "open.json", lambda content: content.update(later="more"))
    edit(folder, "open.json", lambda content: content["workload"].update(later=[1]))
    edit(folder, "manifest.json", lambda content: content.update(later={"deep": []}))
    Capture(folder).check()


# -- what is not a capture, and what is of another version ------------------------------------------------


def test_a_folder_without_open_json_is_not_a_capture(tmp_path: Path) -> None:
    with pytest.raises(NotACapture, match=r"no open\.json"):
        Capture(tmp_path)


def test_another_version_is_named(folder: Path) -> None:
    edit(folder, "open.json", lambda content: content.update(schema=2))
    with pytest.raises(DamagedCapture, match="schema 2, this localizer reads schema 1"):
        Capture(folder)


def test_another_digest_is_not_compared(folder: Path) -> None:
    forge(folder, DIGESTS, metadata='{"algorithm": "sha256", "sites": []}')
    with pytest.raises(DamagedCapture, match="sha256"):
        Capture(folder).check()


@pytest.mark.parametrize("manifest", [True, False])
def test_sites_that_came_as_digests(tmp_path: Path, manifest: bool) -> None:
    """What a GPU hashed is read, verified as far as there are rows, and named by site."""
    plan = Plan(payload=frozenset({QUERY}), hashed=True)
    folder = write(tmp_path, replace(plan, manifest=manifest))
    plain = Capture(write(tmp_path, replace(plan, name="plain", hashed=False)))
    capture = Capture(folder)
    assert verify(folder).state == (SOUND if manifest else INCOMPLETE)
    algorithms = {site.name: site.digest for site in capture.sites}
    assert {name for name, digest in algorithms.items() if digest == XXH3} == {QUERY, TOKEN}
    column = capture.sites.index(next(site for site in capture.sites if site.name == QUERY))
    kept = capture.table.digest[:, column]
    assert np.array_equal(kept, plain.table.digest[:, column])
    other = next(site for site in capture.sites if site.digest == ROWSUM)
    whole = Capture(write(tmp_path, replace(plan, name="whole", payload=None)))
    row = whole.row_payload(other.name, 0)
    assert row is not None
    index = capture.sites.index(other)
    assert bytes(capture.table.digest[0, index]) == row_digest(ROWSUM, row.tobytes())


def test_a_manifest_with_another_digest_than_the_shards(folder: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["sites"][3]["digest"] = ROWSUM

    edit(folder, "manifest.json", change)
    assert "has another digest elsewhere" in refused(folder)


# -- damage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", ["open.json", "manifest.json"])
def test_a_document_cut_anywhere_is_damaged(folder: Path, document: str) -> None:
    blob = (folder / document).read_bytes()
    for length in range(len(blob)):
        (folder / document).write_bytes(blob[:length])
        with pytest.raises(DamagedCapture, match=document):
            Capture(folder)


def test_a_journal_cut_anywhere_is_damaged_where_there_is_a_manifest(folder: Path) -> None:
    blob = (folder / "journal.jsonl").read_bytes()
    for length in range(len(blob)):
        (folder / "journal.jsonl").write_bytes(blob[:length])
        with pytest.raises(DamagedCapture, match="journal"):
            Capture(folder).check()


def test_a_journal_cut_anywhere_is_incomplete_where_there_is_no_manifest(tmp_path: Path) -> None:
    folder = small(tmp_path, manifest=False)
    blob = (folder / "journal.jsonl").read_bytes()
    for length in range(len(blob) + 1):
        (folder / "journal.jsonl").write_bytes(blob[:length])
        capture = Capture(folder)
        assert not capture.complete
        assert len(capture.files) == blob[:length].count(b"}")


def test_a_malformed_line_that_is_not_the_last_is_damage(tmp_path: Path) -> None:
    folder = small(tmp_path, manifest=False)
    path = folder / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:-5] + b"\n" + lines[2])
    with pytest.raises(DamagedCapture, match="line 2"):
        Capture(folder)


@fuzz
@given(st.data())
def test_a_file_cut_or_altered_anywhere_is_damaged(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = small(tmp_path_factory.mktemp("captures"))
    name = data.draw(st.sampled_from([file.name for file in Capture(folder).files]))
    blob = (folder / name).read_bytes()
    where = data.draw(st.integers(0, len(blob) - 1))
    if data.draw(st.booleans()):
        altered = blob[:where]
    else:
        flip = data.draw(st.integers(1, 255))
        altered = blob[:where] + bytes([blob[where] ^ flip]) + blob[where + 1 :]
    (folder / name).write_bytes(altered)
    with pytest.raises(DamagedCapture) as caught:
        Capture(folder).check()
    assert "\n" not in str(caught.value)
    assert verify(folder).state == "damaged"


@pytest.mark.parametrize("name", [ROWS, DIGESTS, PAYLOAD, "journal.jsonl", "log.txt"])
def test_a_missing_file_is_damage(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DamagedCapture):
        Capture(folder).check()


# -- hostile documents ------------------------------------------------------------------------------------


def refused(folder: Path) -> str:
    """The sentence with which a capture is refused."""
    with pytest.raises(DamagedCapture) as caught:
        use(folder)
    assert str(caught.value).isprintable()
    return str(caught.value)


def use(folder: Path) -> None:
    """Read everything there is to read."""
    capture = Capture(folder)
    capture.check()
    _ = capture.label, capture.requests, capture.prompts, capture.outputs, capture.sites, capture.reasons
    for site in capture.sites:
        for row in range(len(capture.table)):
            capture.row_payload(site.name, row)
    for prompt in capture.prompts.values():
        prefix_digest(prompt)


def nested(depth: int) -> Any:
    """Lists, one in another."""
    return [nested(depth - 1)] if depth else 0


def rename_site(name: str) -> Callable[[dict[str, Any]], None]:
    """Give the first site another name, in the manifest's sites and coverage."""

    def change(manifest: dict[str, Any]) -> None:
        site = manifest["sites"][0]
        manifest["coverage"][name] = manifest["coverage"].pop(site["name"])
        site["name"] = name

    return change


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    """Let the manifest list a file under another name."""

    def change(manifest: dict[str, Any]) -> None:
        for file in manifest["files"]:
            if file["name"] == old:
                file["name"] = new

    return change


NAMES = [
    "../x",
    "../../../../etc/passwd",
    "/etc/passwd",
    "rank-0/../../x",
    "rank-0/rows-00000.safetensors/../rows-00000.safetensors",
    "./rank-0/rows-00000.safetensors",
    "rank-00/rows-00000.safetensors",
    "rank-0/rows-0.safetensors",
    "rank-0/rows-٠٠٠٠٠.safetensors",
    "rank-0/rows-00000.safetensors\n",
    "rank-0\\rows-00000.safetensors",
    "rank-0/pickle-00000.safetensors",
    "rank-0/rows-00000.pkl",
    "",
    ".",
    "\0",
    "n" * 100_000,
    "\x1b[31mred",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_that_are_not_of_the_format_are_refused(tmp_path: Path, name: str) -> None:
    folder = small(tmp_path)
    edit(folder, "manifest.json", rename(ROWS, name))
    assert len(refused(folder)) < 1000
    record = {"name": name, "size": 0, "xxh3_128": ""}
    for manifest in (True, False):
        folder = small(tmp_path, name=f"journal-{manifest}", manifest=manifest)
        with (folder / "journal.jsonl").open("a") as journal:
            journal.write(json.dumps(record) + "\n")
        assert len(refused(folder)) < 1000


def test_a_file_listed_twice_is_refused(tmp_path: Path) -> None:
    folder = small(tmp_path)
    edit(folder, "manifest.json", lambda content: content["files"].append(content["files"][0]))
    assert "manifest" in refused(folder)
    folder = small(tmp_path, name="journal", manifest=False)
    path = folder / "journal.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    assert "twice" in refused(folder)


def test_a_shard_that_only_the_manifest_lists_is_refused(folder: Path) -> None:
    path = folder / "journal.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    edit(folder, "open.json", lambda content: None)  # describes the journal anew
    assert "journal and manifest disagree" in refused(folder)


DOCUMENTS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "a request twice": ("manifest.json", lambda d: d["outputs"].append(d["outputs"][0])),
    "an unknown request": ("manifest.json", lambda d: d["outputs"][0].update(request="r99.99")),
    "a request too few": ("manifest.json", lambda d: d["outputs"].pop()),
    "a negative token": ("manifest.json", lambda d: d["outputs"][0].update(tokens=[-1])),
    "a huge token": ("manifest.json", lambda d: d["outputs"][0].update(tokens=[1 << 64])),
    "another state": ("manifest.json", lambda d: d.update(state="fine")),
    "a site twice": ("manifest.json", lambda d: d["sites"].append(d["sites"][0])),
    "no sites": ("manifest.json", lambda d: d.update(sites=[], coverage={})),
    "a site too few": ("manifest.json", lambda d: d["coverage"].pop(d["sites"].pop()["name"])),
    "coverage of nothing": ("manifest.json", lambda d: d["coverage"].update(x=d["coverage"][QUERY])),
    "a negative count": ("manifest.json", lambda d: d["coverage"][QUERY].update(recorded=-1)),
    "rows of no kind": ("manifest.json", lambda d: d["sites"][0].update(rows="some")),
    "an unknown dtype": ("manifest.json", lambda d: d["sites"][0].update(dtype="object")),
    "a negative shape": ("manifest.json", lambda d: d["sites"][0].update(shape=[-1])),
    "a batch of none": ("open.json", lambda d: d["workload"].update(matrix=[0])),
    "a negative batch": ("open.json", lambda d: d["workload"].update(matrix=[1, -2])),
    "requests without prompts": ("open.json", lambda d: d["workload"].update(prompts=[])),
    "a larger batch than prompts": ("open.json", lambda d: d["workload"].update(matrix=[1, 3])),
    "a huge batch": ("open.json", lambda d: d["workload"].update(matrix=[1 << 62])),
    "a batch of many digits": ("open.json", lambda d: d["workload"].update(matrix=[10**400])),
    "endless repeats": ("open.json", lambda d: d["workload"].update(repeats=1 << 40)),
    "no repeats": ("open.json", lambda d: d["workload"].update(repeats=0)),
    "negative prompt tokens": ("open.json", lambda d: d["workload"].update(prompts=[[-1, 2], [3, 4]])),
    "huge prompt tokens": ("open.json", lambda d: d["workload"].update(prompts=[[1 << 64, 2], [3, 4]])),
    "an integer of 65 bits": ("open.json", lambda d: d["workload"].update(seed=1 << 64)),
    "a longer one in a table": ("open.json", lambda d: d["workload"]["engine"].update(a=[{"b": 10**30}])),
    "a negative number": ("open.json", lambda d: d.update(number=-1)),
    "many prompts": ("open.json", lambda d: d["workload"].update(prompts=[[1]] * 100_001)),
    "many variables": (
        "open.json",
        lambda d: d.update(environment=dict.fromkeys(map(str, range(100_001)), "")),
    ),
    "many settings": ("open.json", lambda d: d["workload"].update(engine={"a": [0] * 100_001})),
    "long names of many settings": (
        "open.json",
        lambda d: d["workload"].update(engine={"a" * 10_000: dict.fromkeys(map(str, range(10_000)), 0)}),
    ),
    "deep settings": ("open.json", lambda d: d["workload"].update(sampling={"a": nested(30)})),
    "deep facts": ("manifest.json", lambda d: d["engine"].update(a=nested(500))),
    "many reasons": ("manifest.json", lambda d: d.update(reasons=[""] * 100_001)),
    "negative cached tokens": ("manifest.json", lambda d: d["outputs"][0].update(cached_tokens=-(10**18))),
    "a size of many digits": ("manifest.json", lambda d: d["files"][0].update(size=10**400)),
    "a site without a name": ("manifest.json", rename_site("")),
    "a site with a live name": ("manifest.json", rename_site("model/\x1b[2J\n\u202e")),
    "a site with a long name": ("manifest.json", rename_site("x" * 501)),
    "rows of many dimensions": ("manifest.json", lambda d: d["sites"][0].update(shape=[1] * 17)),
    "rows of too many elements": ("manifest.json", lambda d: d["sites"][0].update(shape=[1 << 40] * 2)),
    "a live state": ("manifest.json", lambda d: d.update(state="\x1b[2J\nfake" * 1000)),
    "another format": ("open.json", lambda d: d.update(format="\x1b[31m" * 100)),
    "no format": ("open.json", lambda d: d.pop("format")),
}


@pytest.mark.parametrize("what", DOCUMENTS)
def test_documents_that_make_no_sense_are_refused(folder: Path, what: str) -> None:
    document, change = DOCUMENTS[what]
    edit(folder, document, change)
    assert len(refused(folder)) < 1000


@pytest.mark.parametrize("document", ["open.json", "manifest.json", "journal.jsonl"])
@pytest.mark.parametrize(
    "blob",
    [
        b"null",
        b"[]",
        b'{"a":' * 200_000,
        b"[" * 200_000 + b"\n",
        b'{"name": "a", "name": "a"}\n',
        b'{"later": NaN}\n',
        b'{"\xff": 1}\n',
        b'{"name": "\xff"}\n',
        b'{"format": "\\ud800"}\n',
    ],
    ids=[
        "null",
        "list",
        "deep",
        "deep list",
        "a key twice",
        "NaN",
        "a key not UTF-8",
        "not UTF-8",
        "half a surrogate",
    ],
)
def test_documents_that_are_not_what_they_should_be(folder: Path, document: str, blob: bytes) -> None:
    (folder / document).write_bytes(blob)
    assert refused(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: object) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


@fuzz
@given(st.data())
def test_any_value_anywhere_in_a_document_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = small(tmp_path_factory.mktemp("captures"))
    document = data.draw(st.sampled_from(["open.json", "manifest.json"]))

    def change(content: dict[str, Any]) -> None:
        container, key = data.draw(st.sampled_from(list(places(content))))
        container[key] = data.draw(JSON)

    edit(folder, document, change)
    with contextlib.suppress(DamagedCapture):
        use(folder)


def test_a_document_is_never_read_through_a_link_or_from_a_pipe(tmp_path: Path) -> None:
    for document in ("open.json", "manifest.json", "journal.jsonl"):
        folder = small(tmp_path, name=f"linked-{document}")
        (folder / document).rename(tmp_path / document)
        (folder / document).symlink_to(tmp_path / document)
        assert document in refused(folder)
    for document in ("manifest.json", "journal.jsonl"):
        folder = small(tmp_path, name=f"dangling-{document}")
        (folder / document).unlink()
        (folder / document).symlink_to(tmp_path / "nothing")
        assert document in refused(folder)
        folder = small(tmp_path, name=f"pipe-{document}")
        (folder / document).unlink()
        os.mkfifo(folder / document)
        assert document in refused(folder)


@pytest.mark.parametrize("document", ["open.json", "manifest.json", "journal.jsonl"])
def test_a_key_twice_in_a_sound_document(folder: Path, document: str) -> None:
    """Readers do not agree on which of the two counts."""
    text = (folder / document).read_text()
    key = "name" if document == "journal.jsonl" else "format"
    (folder / document).write_text(text.replace("{", f'{{"{key}": "x", ', 1))
    assert document in refused(folder)


def test_no_more_memory_is_asked_for_than_a_document_needs(folder: Path) -> None:
    tracemalloc.start()
    try:
        Capture(folder)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_many_sets_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More files than a process may open."""
    monkeypatch.setattr(writer, "SHARD_ROWS", 1)
    prompts = tuple((number, number + 1) for number in range(1, 9))
    folder = small(tmp_path, prompts=prompts, matrix=(8,), repeats=8, chunk=1)
    monkeypatch.undo()
    program = (
        "import resource, sys, pathlib; from localizer.store.verify import verify; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); "
        "print(verify(pathlib.Path(sys.argv[1])).state)"
    )  # a process of its own: how many files this one has open depends on the tests before
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True)
    assert done.stdout == "sound\n", done.stderr
    capture = Capture(folder)
    assert len(capture.files) > 64
    assert capture.row_payload(QUERY, len(capture.table) - 1) is not None


def test_room_is_made_only_for_sets_that_fit(tmp_path: Path) -> None:
    """Rows of a few megabytes times many sites that only the manifest names would be terabytes."""
    folder = tmp_path / "captures"
    recipe = {
        "base": "sets",
        "agree": True,
        "edits": [
            ["set", "manifest.json", ["sites"], [{"name": f"s{i}", "rows": "all"} for i in range(100_000)]],
            [
                *("set", "manifest.json", ["coverage"]),
                {f"s{i}": {"expected": 0, "recorded": 0} for i in range(100_000)},
            ],
        ],
    }
    recipes.cook(recipe, folder)
    assert "does not name all 100000 sites" in refused(folder)


def test_a_document_of_any_length_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_DOCUMENT", 100)
    assert "larger than" in refused(folder)


# -- hostile shards ---------------------------------------------------------------------------------------


def test_a_shard_is_never_read_through_a_link(tmp_path: Path) -> None:
    for manifest in (True, False):
        folder = small(tmp_path, name=f"file-{manifest}", manifest=manifest)
        (folder / ROWS).rename(tmp_path / "elsewhere")
        (folder / ROWS).symlink_to(tmp_path / "elsewhere")
        assert ROWS in refused(folder)
        with pytest.raises(DamagedCapture):  # nor where nobody asked for a check
            _ = Capture(folder).table
        folder = small(tmp_path, name=f"folder-{manifest}", manifest=manifest)
        shutil.move(folder / "rank-0", tmp_path / f"rank-{manifest}")
        (folder / "rank-0").symlink_to(tmp_path / f"rank-{manifest}")
        assert "rank-0" in refused(folder)


def changed(
    shard: str, name: str, change: Callable[[np.ndarray], np.ndarray | None]
) -> Callable[[Path], None]:
    return lambda folder: forge(folder, shard, arrays={name: change(column(folder, shard, name))})


def filled(shard: str, name: str, value: int) -> Callable[[Path], None]:
    return changed(shard, name, lambda array: np.full_like(array, value))


def facts(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads(tensors.TensorFile(folder / DIGESTS).metadata)
        forge(folder, DIGESTS, metadata=json.dumps(content | changes))

    return change


def payload_facts(name: str, array: np.ndarray | None) -> Callable[[Path], None]:
    return lambda folder: forge(folder, PAYLOAD, arrays={name: array})


SITE = {"name": "x", "rows": "all", "dtype": "float32", "shape": [1]}

SHARDS: dict[str, Callable[[Path], None]] = {
    "an unknown request": filled(ROWS, "request", 99),
    "a negative request": filled(ROWS, "request", -1),
    "an unknown kind": filled(ROWS, "kind", 200),
    "an unknown value of logits": filled(ROWS, "logits", 3),
    "a negative position": filled(ROWS, "position", -1),
    "a position far out": filled(ROWS, "position", 1 << 24),
    "a negative step": filled(ROWS, "step", -1),
    "a negative occurrence": filled(ROWS, "occurrence", -1),
    "no position": changed(ROWS, "position", lambda array: None),
    "no prefix": changed(ROWS, "prefix", lambda array: None),
    "positions without a dimension": changed(ROWS, "position", lambda array: array[0]),
    "positions of another dtype": changed(ROWS, "position", lambda array: array.astype(np.int64)),
    "a column too short": changed(ROWS, "token", lambda array: array[1:]),
    "prefixes too short": changed(ROWS, "prefix", lambda array: array[:, 1:]),
    "digests too short": changed(DIGESTS, "digest", lambda array: array[:, :, 1:]),
    "digests of too few rows": changed(DIGESTS, "digest", lambda array: array[1:]),
    "no digests": changed(DIGESTS, "digest", lambda array: None),
    "presence of too many sites": changed(DIGESTS, "present", lambda array: np.repeat(array, 2, axis=1)),
    "presence of another dtype": changed(DIGESTS, "present", lambda array: array.astype(np.int8)),
    "no facts": lambda folder: forge(folder, DIGESTS, metadata=""),
    "facts that are no JSON": lambda folder: forge(folder, DIGESTS, metadata="{"),
    "deep facts": lambda folder: forge(folder, DIGESTS, metadata='{"a":' * 100_000),
    "facts without sites": facts(sites=[]),
    "facts with another site": facts(sites=[SITE] * 1),
    "a site twice": facts(sites=[SITE] * 9),
    "a site of an unknown dtype": facts(sites=[SITE | {"dtype": "void"}]),
    "a site of an unknown digest": facts(algorithm="by-site", sites=[SITE | {"digest": "md5"}]),
    "digests that are not those of the sites": facts(algorithm="by-site"),
    "sites that have other digests than is said": facts(sites=[SITE | {"digest": ROWSUM}]),
    "payload of an unknown site": payload_facts("unknown", np.zeros((1, 1), np.float32)),
    "payload without rows": payload_facts(f"{QUERY}#rows", None),
    "payload without a dimension": payload_facts(QUERY, np.zeros((), np.float32)),
    "payload of another dtype": changed(PAYLOAD, QUERY, lambda array: array.view(np.uint16)),
    "payload of another shape": changed(PAYLOAD, QUERY, lambda array: array[:, :, :1]),
    "payload of a row too few": changed(PAYLOAD, QUERY, lambda array: array[1:]),
    "payload of unknown rows": filled(PAYLOAD, f"{QUERY}#rows", 9),
    "payload of negative rows": filled(PAYLOAD, f"{QUERY}#rows", -1),
    "payload of half rows": changed(PAYLOAD, f"{QUERY}#rows", lambda array: array.astype(np.float64)),
}


@pytest.mark.parametrize("what", SHARDS)
def test_shards_that_do_not_fit_together_are_refused(folder: Path, what: str) -> None:
    SHARDS[what](folder)
    assert len(refused(folder)) < 1000


def test_facts_with_half_a_surrogate_are_refused(folder: Path) -> None:
    """safetensors writes no such text, but anybody can."""
    blob = (folder / DIGESTS).read_bytes()
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    header["__metadata__"] = {"localizer": "\ud800"}
    text = json.dumps(header).encode()
    (folder / DIGESTS).write_bytes(len(text).to_bytes(8, "little") + text + blob[8 + length :])
    edit(folder, "open.json", lambda content: None)
    assert DIGESTS in refused(folder)


def test_rows_without_digests_are_refused_in_a_finished_capture(folder: Path) -> None:
    def drop(content: dict[str, Any]) -> None:
        content["files"] = [file for file in content["files"] if file["name"] != DIGESTS]

    path = folder / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if DIGESTS not in line))
    edit(folder, "manifest.json", drop)
    edit(folder, "open.json", lambda content: None)
    assert "do not belong together" in refused(folder)


def test_a_pair_differs_only_where_it_was_changed(tmp_path: Path) -> None:
    """The builder's captures of one plan hold equal bytes."""
    left, right = (Capture(path) for path in pair(tmp_path, SMALL))
    assert np.array_equal(left.table.digest, right.table.digest)
    assert [part.kept_rows(QUERY).tolist() for part in left.sets] == [list(range(9))]
