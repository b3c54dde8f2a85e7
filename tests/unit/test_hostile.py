"""Whatever a capture holds, every command ends with a sentence and an exit code, and nothing becomes live."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from altered import DIGESTS, PAYLOAD, ROWS, SMALL, small
from builders import attention, bump
from fuzz import recipes
from fuzz.recipes import JOURNAL, LIVE, LOG, MANIFEST, OPEN

from localizer.cli.main import main

QUERY = attention(0, "query")
WORK = ["workload"]
FILES = ["files", 0]
FACTS = [recipes.FACTS, "localizer"]
EMPTY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}


@dataclass(frozen=True)
class Said:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


Localize = Callable[..., Said]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Localize:
    """Call `localize` in an empty folder; it never says more than one sentence, and nothing live."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCALIZER_DEBUG", raising=False)

    def call(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["localize", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        said = Said(int(ended.value.code or 0), captured.out, captured.err)
        assert all(line.isprintable() for line in (said.out + said.err).split("\n"))
        assert "itself failed" not in said.err
        if said.code == 2:
            assert said.out == ""
            assert len(said.err.splitlines()) == 1
            assert said.err.startswith("localize: ")
            assert said.err.rstrip().endswith((".", "...")), said.err
        else:
            assert said.err == ""
        return said

    return call


def cooked(root: Path, *edits: list[Any], base: str = "complete", agree: bool = True) -> Path:
    """A capture `hostile`, altered as the edits say (see fuzz/recipes.py)."""
    folder = root / "captures" / "hostile" / "0001"
    recipes.cook({"base": base, "agree": agree, "edits": [list(edit) for edit in edits]}, folder)
    return folder


def put(document: str, *path: Any, value: Any) -> list[Any]:
    """An edit that sets a value."""
    return ["set", document, list(path), value]


def site_called(name: str) -> tuple[list[Any], ...]:
    """Edits that give the first site another name everywhere."""
    header = recipes.taken_apart(PAYLOAD, recipes.base("complete")[PAYLOAD])
    rename = [
        edit
        for end in ("", "#rows")
        for edit in (
            put(PAYLOAD, name + end, value=header["model/input_ids" + end]),
            ["drop", PAYLOAD, ["model/input_ids" + end]],
        )
    ]
    return (
        *rename,
        put(MANIFEST, "sites", 0, "name", value=name),
        put(MANIFEST, "coverage", name, value={"expected": 9, "recorded": 9}),
        ["drop", MANIFEST, ["coverage", "model/input_ids"]],
        put(DIGESTS, *FACTS, "sites", 0, "name", value=name),
    )


# Refused when it is opened: verify 1, everything else 2.
DOCUMENTS: dict[str, tuple[list[Any], ...]] = {
    "an escape as a format": (put(OPEN, "format", value=LIVE),),
    "an escape as a state": (put(MANIFEST, "state", value=LIVE),),
    "an escape as a kind of rows": (put(MANIFEST, "sites", 0, "rows", value=LIVE),),
    "an escape as a dtype": (put(MANIFEST, "sites", 0, "dtype", value=LIVE),),
    "an escape as a site": site_called(LIVE),
    "an escape as a request": (put(MANIFEST, "outputs", 0, "request", value=LIVE),),
    "an escape as a shard": (put(JOURNAL, 0, "name", value=LIVE),),
    "an escape as a file": (put(MANIFEST, "files", 0, "name", value=LIVE),),
    "a path upwards": (put(JOURNAL, 0, "name", value="../../x"), put(MANIFEST, *FILES, "name", value="../x")),
    "a path from the root": (put(JOURNAL, 0, "name", value="/etc/passwd"),),
    "a path to a rank with zeros": (put(JOURNAL, 0, "name", value="rank-00/rows-00000.safetensors"),),
    "a schema of many digits": (put(OPEN, "schema", value=10**400),),
    "a number of many digits": (put(OPEN, "number", value=10**400),),
    "a size of many digits": (put(MANIFEST, *FILES, "size", value=10**400),),
    "NaN": (put(MANIFEST, "durations", "total", value=float("nan")),),
    "an infinity where nobody looks": (put(MANIFEST, "later", value=float("inf")),),
    "deep lists where nobody looks": (put(OPEN, "later", value={"$nest": 100_000}),),
    "deep settings": (put(OPEN, *WORK, "engine", "x", value={"$nest": 900}),),
    "many settings": (put(MANIFEST, "engine", "x", value={"$list": [0, 150_000]}),),
    "many reasons": (put(MANIFEST, "reasons", value={"$list": ["", 150_000]}),),
    "many requests": (put(OPEN, *WORK, "repeats", value=1 << 40),),
    "more requests than prompts": (put(OPEN, *WORK, "matrix", value=[100_000]),),
    "a manifest that is a list": (["bytes", MANIFEST, 0, "5b5d"], ["cut", MANIFEST, 2]),
    "a manifest cut short": (["cut", MANIFEST, 100],),
    "an open.json of nothing": (["cut", OPEN, 0],),
    "a manifest that is a link": (["become", MANIFEST, "link"],),
    "a manifest that is a pipe": (["become", MANIFEST, "pipe"],),
    "a manifest that links to itself": (["become", MANIFEST, "loop"],),
    "an open.json that is a link": (["become", OPEN, "link"],),
    "a journal that is a folder": (["become", JOURNAL, "folder"],),
    "a journal that is a pipe": (["become", JOURNAL, "pipe"],),
    "a journal without lines": (["cut", JOURNAL, 0],),
    "a file twice": (put(JOURNAL, 99, value={"name": ROWS, "size": 1, "xxh3_128": ""}),),
}

# Refused when it is read: verify 1, diff and show 2; the documents themselves can be shown as JSON.
SHARDS: dict[str, tuple[list[Any], ...]] = {
    "other sites in a set": (put(DIGESTS, *FACTS, "sites", 0, "name", value="other/site"),),
    "an escape as a site of a set": (put(DIGESTS, *FACTS, "sites", 0, "name", value=LIVE),),
    "an escape as an algorithm": (put(DIGESTS, *FACTS, "algorithm", value=LIVE),),
    "an escape as a tensor": (put(PAYLOAD, LIVE, value=EMPTY),),
    "a malformed tensor with an escape": (put(PAYLOAD, LIVE, value=1),),
    "a negative offset": (put(ROWS, "position", "data_offsets", value=[-4, 32]),),
    "offsets far out": (put(ROWS, "position", "data_offsets", value=[1 << 61, (1 << 61) + 36]),),
    "tensors that overlap": (put(ROWS, "position", "data_offsets", value=[0, 36]),),
    "an enormous tensor": (put(ROWS, "position", "shape", value=[1 << 40, 1 << 40]),),
    "a wrong dtype": (put(ROWS, "position", "dtype", value="F32"),),
    "no dtype": (put(ROWS, "position", "dtype", value={"$nest": 50}),),
    "a deep header": (put(ROWS, "x", value={"$nest": 100_000}),),
    "a header with NaN": (put(ROWS, "x", value=float("nan")),),
    "a header longer than the file": (["bytes", ROWS, 0, "ffffffffffffff7f"],),
    "a negative position": (["fill", ROWS, "position", 0, -1],),
    "a position far out": (["fill", ROWS, "position", -1, (1 << 31) - 1],),
    "an unknown kind": (["fill", ROWS, "kind", 0, 255],),
    "an unknown request": (["fill", ROWS, "request", 0, 99],),
    "a shard cut short": (["cut", DIGESTS, 500],),
    "a shard that is a link": (["become", ROWS, "link"],),
    "a shard that is a pipe": (["become", ROWS, "pipe"],),
}


def codes(run: Localize, name: str = "hostile") -> tuple[int, ...]:
    """Exit codes of verify, show, show as JSON, and diff both ways in both forms; `list` must work."""
    assert run("list").code == 0
    commands = [
        *(("verify", name), ("show", name), ("show", name, "--format", "json")),
        *(("diff", name, "good"), ("diff", "good", name, "--format", "json")),
    ]
    return tuple(run(*arguments).code for arguments in commands)


@pytest.mark.parametrize("what", DOCUMENTS)
def test_documents_that_are_refused(run: Localize, tmp_path: Path, what: str) -> None:
    cooked(tmp_path, *DOCUMENTS[what])
    small(tmp_path / "captures", name="good")
    assert codes(run) == (1, 2, 2, 2, 2)
    assert "damaged" in run("list").out


@pytest.mark.parametrize("what", SHARDS)
def test_shards_that_are_refused(run: Localize, tmp_path: Path, what: str) -> None:
    cooked(tmp_path, *SHARDS[what])
    small(tmp_path / "captures", name="good")
    assert codes(run) == (1, 2, 0, 2, 2)


# What is wrong with kept rows is found by verify; by diff where it reads one of them.
KEPT: dict[str, tuple[list[Any], ...]] = {
    "rows that do not exist": (["fill", PAYLOAD, f"{QUERY}#rows", 0, 1 << 40],),
    "negative rows": (["fill", PAYLOAD, f"{QUERY}#rows", 0, -1],),
    "rows not in their order": (["fill", PAYLOAD, f"{QUERY}#rows", 1, 0],),
    "bytes of another row": (["fill", PAYLOAD, QUERY, -1, 0],),
}


@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize("what", KEPT)
def test_kept_rows_are_refused_where_they_are_read(
    run: Localize, tmp_path: Path, what: str, agree: bool
) -> None:
    """With equal digests no kept row is read, with different ones the first that differs is."""
    cooked(tmp_path, *KEPT[what], agree=agree)
    small(tmp_path / "captures", name="good")
    small(tmp_path / "captures", name="other", changes={("r00.00", 0, QUERY): bump()})
    assert codes(run) == (1, 0, 0, 0, 0)
    said = run("diff", "hostile", "other")
    assert said.code == 2
    assert PAYLOAD in said.err
    assert run("diff", "other", "hostile", "--format", "json").code == 2


EVERYWHERE = (
    *(put(OPEN, *path, value=LIVE) for path in (["name"], ["created"], ["localizer"], ["host", LIVE])),
    *(put(OPEN, "source", key, value=LIVE) for key in ("python", "python_version", "vllm", "torch")),
    put(OPEN, "source", "overlay", value={"path": LIVE, "files": {LIVE: LIVE}}),
    put(OPEN, *WORK, "model", value={"name": LIVE, "path": LIVE, "files": {LIVE: LIVE}}),
    put(OPEN, *WORK, "engine", LIVE, value=[{LIVE: LIVE}]),
    put(OPEN, *WORK, "sampling", LIVE, value={LIVE: LIVE}),
    put(OPEN, "environment", LIVE, value=LIVE),
    *(put(OPEN, "observer", key, value=LIVE) for key in ("layers", "payload", "transactions")),
    *(put(OPEN, "observer", key, value=[LIVE]) for key in ("changes", "sites", "rows")),
    put(MANIFEST, "reasons", value=[LIVE]),
    put(MANIFEST, "state", value="incomplete"),
    *(put(MANIFEST, key, LIVE, value=LIVE) for key in ("not_applicable", "untapped", "engine")),
    *(put(MANIFEST, key, LIVE, value=1) for key in ("counts", "durations", "peak_memory_bytes")),
    put(MANIFEST, "config", value={LIVE: {LIVE: [LIVE]}}),
    put(MANIFEST, "kv_contents", value={LIVE: f"not read{LIVE}"}),
    put(MANIFEST, "weights", value={"algorithm": LIVE, "digest": LIVE, "tensors": {LIVE: LIVE}}),
    put(
        MANIFEST,
        "compiled",
        value={"mode": LIVE, "backend": LIVE, "cache": LIVE, "counters": {LIVE: 1}, "files": {LIVE: LIVE}},
    ),
    put(
        MANIFEST,
        "identity",
        value={
            "native": {LIVE: LIVE},
            "python": {"files": 1, "digest": LIVE, "changed": [LIVE]},
            "processor": {"model": LIVE, "flags": [LIVE], "capability": LIVE, "threads": 1},
            "gpus": [{"name": LIVE, "uuid": LIVE, "driver": LIVE}],
            "checkout": {"commit": LIVE, "dirty": None},
        },
    ),
    *(put(MANIFEST, "outputs", 0, key, value=LIVE) for key in ("internal", "external", "finish")),
)


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        (EVERYWHERE, (3, 0, 0, 3, 3)),
        ([put(OPEN, "observer", "rows", value=["\u00b2", "r\u0661", "9" * 5000])], (0, 0, 0, 0, 0)),
        ([put(OPEN, "observer", "transactions", value="first:" + "9" * 5000)], (0, 0, 0, 0, 0)),
        ([put(OPEN, "observer", "layers", value={"$text": ["0-9999999999,", 100_000]})], (0, 0, 0, 0, 0)),
        (site_called("model.layers.99999999999999999999.self_attn.attn/output"), (0, 0, 0, 0, 0)),
        (site_called("draft:model.layers.0.self_attn.attn/output"), (0, 0, 0, 0, 0)),
        ([["fill", ROWS, "kind", -1, 6]], (1, 0, 0, 3, 3)),  # rows of a draft pair with none of the target
        ([["fill", ROWS, "kind", 0, 69]], (1, 0, 0, 0, 0)),
        ([["fill", DIGESTS, "present", -1, 0]], (1, 0, 0, 3, 3)),
        ([put(MANIFEST, "outputs", 0, "cached_tokens", value=(1 << 63) - 1)], (0, 0, 0, 0, 0)),
        ([put(OPEN, *WORK, "max_tokens", value=0), put(OPEN, *WORK, "seed", value=-(1 << 63))], (0,) * 5),
        ([["append", LOG, "1b5b324a"]], (0, 0, 0, 0, 0)),
    ],
)  # fmt: skip
def test_odd_captures_that_are_read(
    run: Localize, tmp_path: Path, edits: tuple[list[Any], ...], expected: tuple[int, ...]
) -> None:
    cooked(tmp_path, *edits)
    small(tmp_path / "captures", name="good")
    assert codes(run) == expected
    said = run("report", "hostile", "good", "--format", "html")
    assert said.code == 0
    assert said.out.count("<script") == said.out.count("</script") == 2


STEPS = "rank-0/steps-00000.jsonl"


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (put(STEPS, 0, "graph", value=LIVE), (0, 0, 0, 0, 0)),
        (put(STEPS, 0, "backend", value={LIVE: LIVE}), (0, 0, 0, 0, 0)),
        (put(STEPS, 0, "backend", value={"$nest": 50}), (1, 2, 2, 2, 2)),
        (put(STEPS, 0, LIVE, value=LIVE), (0, 0, 0, 0, 0)),
        (put(STEPS, 0, "requests", value=[1 << 62]), (1, 2, 2, 2, 2)),
        (put(STEPS, 0, "scheduled", value=[(1 << 63) - 1]), (1, 0, 0, 0, 0)),
        (["cut", STEPS, 500], (1, 2, 2, 2, 2)),
        (["become", STEPS, "link"], (1, 2, 2, 2, 2)),
    ],
)
def test_traces(run: Localize, tmp_path: Path, edit: list[Any], expected: tuple[int, ...]) -> None:
    """What is shown of a trace is harmless; one that makes no sense is refused by those who read it."""
    cooked(tmp_path, edit, base="traced")
    small(tmp_path / "captures", name="good", traced=True)
    assert codes(run) == expected


NAMES = (b"not-\xff-utf8", "\x1b[2J\x9b31m\u202e".encode(), b"two\nlines", b"[red]x[/red]<b>", b"-x")


@pytest.mark.parametrize("name", NAMES)
def test_folders_of_any_name(run: Localize, tmp_path: Path, name: bytes) -> None:
    """In captures/ such a folder is no capture's name; given as a path it is read all the same."""
    small(tmp_path / "captures", name="good")
    for place in (b"captures", b"."):
        for document in (None, OPEN, MANIFEST):
            path = os.path.join(os.fsencode(tmp_path), place, name)
            shutil.copytree(os.fsencode(tmp_path / "captures" / "good"), path)
            if document is not None:
                Path(os.fsdecode(path), "0001", document).write_text('{"format": 1}')
            expected = (0, 0, 0, 0, 0) if document is None else (1, 2, 2, 2, 2)
            assert codes(run, os.fsdecode(path)) == expected
            assert run("show", os.fsdecode(path) + "/nothing").code == 2
            shutil.rmtree(path)


def test_no_folder_is_taken_for_a_capture_by_its_digits_alone(run: Localize, tmp_path: Path) -> None:
    small(tmp_path / "captures", name="good")
    for name in ("\u0660\u0660\u0660\u0661", "9" * 200):
        shutil.copytree(tmp_path / "captures/good/0001", tmp_path / "captures/good" / name)
    assert [line.split()[0] for line in run("list").out.splitlines()] == ["capture", "good/0001"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_streams_of_any_encoding(tmp_path: Path, encoding: str) -> None:
    cooked(tmp_path, *EVERYWHERE)
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    for arguments in (("show", "hostile"), ("diff", "hostile", "hostile"), ("show", "caf\u00e9\u202e\udcff")):
        command = [sys.executable, "-m", "localizer", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
        text = (done.stdout + done.stderr).decode("utf-8" if encoding == "ascii" else encoding)
        assert done.returncode in (0, 2, 3), text
        assert all(line.isprintable() for line in text.split("\n"))
        assert "itself failed" not in text


# -- small captures that would ask for much ---------------------------------------------------------------

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
sys.argv[0] = "localize"
from localizer.cli.main import main
main()
"""

GREEDY: dict[str, tuple[str, tuple[list[Any], ...]]] = {
    "as many requests as there may be": (
        "killed",
        (put(OPEN, *WORK, "matrix", value=[1]), put(OPEN, *WORK, "repeats", value=100_000)),
    ),
    "a batch of as many": (
        "killed",
        (
            put(OPEN, *WORK, "matrix", value=[100_000]),
            put(OPEN, *WORK, "repeats", value=1),
            put(OPEN, *WORK, "prompts", value={"$list": [[], 100_000]}),
        ),
    ),
    "as many requests of a long prompt": (
        "killed",
        (
            put(OPEN, *WORK, "matrix", value=[1]),
            put(OPEN, *WORK, "repeats", value=100_000),
            put(OPEN, *WORK, "prompts", value=[{"$list": [0, 200_000]}]),
        ),
    ),
    "settings": ("killed", (put(OPEN, *WORK, "engine", value={"$table": [0, 99_000]}),)),
    "texts": ("killed", (put(OPEN, "observer", "changes", value={"$list": [LIVE, 99_000]}),)),
}


@pytest.mark.parametrize("what", GREEDY)
def test_little_is_done_for_a_capture_that_says_little(tmp_path: Path, what: str) -> None:
    """A gigabyte and a few seconds do for each command, with the capture on either side."""
    base, edits = GREEDY[what]
    cooked(tmp_path, *edits, base=base)
    small(tmp_path / "captures", name="good")
    name = "hostile"
    commands = ("verify", name), ("show", name), ("diff", name, name), ("diff", "good", name)
    for arguments in (*commands, ("report", "good", name, "--format", "html")):
        command = [sys.executable, "-c", LIMITED, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode in (0, 3), done.stderr
        assert done.stderr == ""


def test_the_requests_of_a_long_prompt_are_paired_in_no_time(run: Localize, tmp_path: Path) -> None:
    """A prompt that all requests share is looked at once, not once a request."""
    for name, repeats in (("one", 100_000), ("other", 99_999)):
        folder = tmp_path / "captures" / name / "0001"
        edits = [
            put(OPEN, *WORK, "matrix", value=[1]),
            put(OPEN, *WORK, "repeats", value=repeats),
            put(OPEN, *WORK, "prompts", value=[{"$list": [0, 200_000]}]),
        ]
        recipes.cook({"base": "tokens", "agree": True, "edits": edits}, folder)
        os.remove(folder / MANIFEST)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    assert run("diff", "one", "other").code == 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 30


def test_the_base_captures_are_sound(tmp_path: Path, run: Localize) -> None:
    """What the tests above alter is in order before."""
    assert recipes.base("complete")[OPEN] == (small(tmp_path / "x") / OPEN).read_bytes()
    for base in recipes.BASES:
        folder = tmp_path / "captures" / base / "0001"
        recipes.cook({"base": base, "agree": True, "edits": []}, folder)
        assert run("verify", base).code == (3 if base.startswith("killed") else 0)
    assert json.loads(recipes.base("complete")[OPEN])["workload"]["matrix"] == list(SMALL.matrix)
