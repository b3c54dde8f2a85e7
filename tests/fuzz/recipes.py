"""Hostile captures as data: a small sound capture, and a list of what was done to it.

A recipe is a JSON object:

    {"base": "complete", "agree": true, "edits": [["set", "open.json", ["workload", "repeats"], 0], ...]}

`base` is one of `BASES`. With `agree`, journal and manifest are made to give the sizes and digests of the
altered files, so that the alteration is met by the checks behind those. An edit is one of

    ["set", DOCUMENT, PATH, VALUE]          a value of a JSON document; of a shard its header, whose metadata
    ["drop", DOCUMENT, PATH]                is taken apart as well; of *.jsonl a list of its lines
    ["fill", SHARD, TENSOR, INDEX, NUMBER]  an element of a tensor, or with index -1 all of them
    ["bytes", FILE, OFFSET, HEX]            some bytes
    ["cut", FILE, LENGTH]                   the end
    ["append", FILE, HEX]                   more bytes at the end
    ["become", FILE, WHAT]                  one of `KINDS_OF_FILE` in the file's place

What would be long is written short: see `expand`. Edits that do not fit the capture do nothing.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import xxhash
from altered import DIGESTS, PAYLOAD, ROWS, SMALL
from builders import Plan, write

from localizer.store import writer

BASES: dict[str, Plan] = {
    "complete": SMALL,
    "killed": replace(SMALL, manifest=False),
    "speculative": replace(SMALL, max_tokens=4, speculate=2),
    "sets": replace(SMALL, chunk=1, repeats=2),
    "traced": replace(SMALL, traced=True),
    "tokens": replace(SMALL, only_tokens=True),
    "ranks": replace(SMALL, ranks=2, traced=True),
    "killed-rank": replace(SMALL, ranks=2, manifest=False, cut={1: 1}),
}
"""The captures that are altered; the rows of "sets" lie in several sets of shards."""

OPEN, MANIFEST, JOURNAL, LOG = "open.json", "manifest.json", "journal.jsonl", "log.txt"
DOCUMENTS = (OPEN, MANIFEST, JOURNAL)
SHARDS = (ROWS, DIGESTS, PAYLOAD)
FACTS = "__metadata__"
KINDS_OF_FILE = ("nothing", "folder", "pipe", "link", "dangling", "loop")
LONGEST, MOST_EDITS, DEEPEST = 200_000, 60, 40
"""Most items that a short form stands for, most edits of a recipe that count, and longest path of a place."""

Files = dict[str, bytes]


@cache
def base(name: str) -> Files:
    """The files of a base capture by name."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = 4 if name == "sets" else writer.SHARD_ROWS
        with mock.patch.object(writer, "SHARD_ROWS", rows):
            folder = write(Path(scratch), BASES[name])
        return {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }


def lay(files: Files, folder: Path) -> None:
    """Write files into an empty folder."""
    (folder / "rank-0").mkdir(parents=True)
    for name, blob in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(blob)


def cook(recipe: dict[str, Any], folder: Path) -> None:
    """Lay the altered capture into `folder`, which is not there yet."""
    files = dict(base(recipe["base"]))
    edits = recipe["edits"]
    late = {JOURNAL: 1, MANIFEST: 2}  # they are described from what they describe
    for stage in range(3):
        if recipe["agree"] and stage == 1:
            _describe_journal(files)
        if recipe["agree"] and stage == 2:
            _describe_manifest(files)
        for edit in edits:
            if late.get(edit[1], 0) == stage and edit[0] != "become":
                _edit(files, *edit)
    lay(files, folder)
    for edit in edits:
        if edit[0] == "become":
            _become(folder, edit[1], edit[2])


def expand(value: Any) -> Any:
    """The value that a short form stands for.

    `{"$nest": N}` is N lists one in another, `{"$text": [TEXT, N]}` a text N times, `{"$list": [VALUE, N]}`
    a list of N values, and `{"$table": [VALUE, N]}` an object of N of them.
    """
    match value:
        case {"$nest": int(number)}:
            found: Any = []
            for _ in range(min(number, LONGEST)):
                found = [found]
            return found
        case {"$text": [str(text), int(number)]}:
            return text * min(number, LONGEST)
        case {"$list": [item, int(number)]}:
            return [expand(item)] * min(number, LONGEST)
        case {"$table": [item, int(number)]}:
            return {str(key): expand(item) for key in range(min(number, LONGEST))}
        case dict():
            return {key: expand(item) for key, item in value.items()}
        case list():
            return [expand(item) for item in value]
    return value


def _describe_journal(files: Files) -> None:
    lines = [json.loads(line) for line in files[JOURNAL].splitlines()]
    files[JOURNAL] = b"".join(json.dumps(_now(files, line)).encode() + b"\n" for line in lines)


def _describe_manifest(files: Files) -> None:
    if MANIFEST in files:
        manifest = json.loads(files[MANIFEST])
        manifest["files"] = [_now(files, record) for record in manifest["files"]]
        files[MANIFEST] = json.dumps(manifest).encode()


def _now(files: Files, record: dict[str, Any]) -> dict[str, Any]:
    blob = files[record["name"]]
    return record | {"size": len(blob), "xxh3_128": xxhash.xxh3_128_hexdigest(blob)}


def _edit(files: Files, kind: str, name: str, *rest: Any) -> None:
    if name not in files:
        return
    match kind, rest:
        case "set", [list(path), value]:
            _documents(files, name, lambda tree: _put(tree, path, expand(value)))
        case "drop", [list(path)]:
            _documents(files, name, lambda tree: _drop(tree, path))
        case "fill", [str(tensor), int(index), int(number)]:
            _fill(files, name, tensor, index, number)
        case "bytes", [int(offset), str(text)]:
            blob, new = files[name], bytes.fromhex(text)
            at = offset % (len(blob) + 1)
            files[name] = blob[:at] + new + blob[at + len(new) :]
        case "cut", [int(length)]:
            files[name] = files[name][: length % (len(files[name]) + 1)]
        case "append", [str(text)]:
            files[name] += bytes.fromhex(text)


def _documents(files: Files, name: str, change: Callable[[Any], None]) -> None:
    tree = taken_apart(name, files[name])
    if tree is not None:
        change(tree)
        files[name] = _put_together(name, tree, files[name])


def taken_apart(name: str, blob: bytes) -> Any:
    """A document as a tree; the header of a shard; the lines of a journal. None if it is malformed."""
    try:
        if name.endswith(".jsonl"):
            return [json.loads(line) for line in blob.splitlines()]
        if name not in DOCUMENTS:
            length = int.from_bytes(blob[:8], "little")
            header = json.loads(blob[8 : 8 + length])
            facts = header[FACTS]["localizer"]
            header[FACTS]["localizer"] = json.loads(facts) if facts else facts
            return header
        return json.loads(blob)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _put_together(name: str, tree: Any, blob: bytes) -> bytes:
    if name.endswith(".jsonl"):
        return b"".join(dump(line) + b"\n" for line in tree)
    if name in DOCUMENTS:
        return dump(tree)
    body = blob[8 + int.from_bytes(blob[:8], "little") :]
    if isinstance(tree.get(FACTS), dict) and isinstance(tree[FACTS].get("localizer"), dict):
        tree = tree | {FACTS: tree[FACTS] | {"localizer": dump(tree[FACTS]["localizer"]).decode()}}
    text = dump(tree)
    return len(text).to_bytes(8, "little") + text + body


def dump(value: Any) -> bytes:
    """JSON of any depth (json.dumps stops at the recursion limit)."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return _deep(value).encode()


def _deep(value: Any) -> str:
    depth, inner = 0, value
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{_deep(item)}" for key, item in value.items()) + "}"
    while isinstance(inner, list) and len(inner) == 1:
        depth, inner = depth + 1, inner[0]
    if isinstance(inner, list) and depth < 100:
        return "[" * depth + "[" + ",".join(map(_deep, inner)) + "]" + "]" * depth
    return "[" * depth + json.dumps(inner) + "]" * depth


def _put(tree: Any, path: list[Any], value: Any) -> None:
    holder = _holder(tree, path)
    if isinstance(holder, dict):
        holder[str(path[-1])] = value
    elif isinstance(holder, list) and isinstance(path[-1], int):
        if 0 <= path[-1] < len(holder):
            holder[path[-1]] = value
        else:
            holder.append(value)


def _drop(tree: Any, path: list[Any]) -> None:
    holder = _holder(tree, path)
    if isinstance(holder, dict):
        holder.pop(str(path[-1]), None)
    elif isinstance(holder, list) and isinstance(path[-1], int) and 0 <= path[-1] < len(holder):
        del holder[path[-1]]


def _holder(tree: Any, path: list[Any]) -> Any:
    """The object or list that holds what a path names; None if there is none."""
    if not path:
        return None
    for step in path[:-1]:
        try:
            tree = tree[step]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def _fill(files: Files, name: str, tensor: str, index: int, number: int) -> None:
    blob, header = files[name], taken_apart(name, files[name])
    entry = header.get(tensor) if isinstance(header, dict) else None
    widths = {"I64": 8, "I32": 4, "BF16": 2, "U8": 1}
    if not isinstance(entry, dict) or entry.get("dtype") not in widths:
        return
    width = widths[entry["dtype"]]
    begin, end = (8 + int.from_bytes(blob[:8], "little") + offset for offset in entry["data_offsets"])
    element = (number % (1 << 8 * width)).to_bytes(width, "little")
    count = (end - begin) // width
    if index < 0:
        files[name] = blob[:begin] + element * count + blob[end:]
    elif count:
        at = begin + index % count * width
        files[name] = blob[:at] + element + blob[at + width :]


def _become(folder: Path, name: str, what: str) -> None:
    path = folder / name
    if not path.is_file():
        return
    moved = folder.with_name(f"{folder.name}-{path.name}")
    path.rename(moved)
    match what:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(moved)
        case "dangling":
            path.symlink_to(folder / "nowhere")
        case "loop":
            path.symlink_to(path.name)


# -- making recipes ---------------------------------------------------------------------------------------


def parse(data: bytes) -> dict[str, Any] | None:
    """The recipe that an input of the fuzzer holds; None where it holds none."""
    try:
        recipe = json.loads(data)
        edits = [edit for edit in recipe["edits"] if all(isinstance(part, str) for part in edit[:2])]
        edits = [edit for edit in edits if len(edit) > 2][:MOST_EDITS]
        found = {"base": recipe["base"], "agree": bool(recipe["agree"]), "edits": edits}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if found["base"] in BASES else None


LIVE = "\x1b[2J\x1b]0;t\x07\n\x9b31m\u202e\u2028[red]x[/red]<b>&amp;|`@\x7f"
"""Text that must never become live."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 5, 8, -1, 63, 64, 255, 256, 1 << 15, 100_000, 1 << 24),
    *((1 << 31) - 1, 1 << 31, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 10**30),
    *(0.0, -0.0, 1.5, 1e308, float("nan"), float("inf"), 1e-320),
    *["all", "logits", "tokens", "draft", "draft-logits", "complete", "incomplete", "first", "0,5-9"],
    *["length", "abort", "..", "../../x", "/etc/passwd", "rank-0/rows-00001.safetensors", "r00.00", "r99.99"],
    *["xxh3-128", "bool", "int64", "float64", "float8_e5m2", "F64", "BOOL", "I32", "F8_E4M3"],
    *["sampler/token", "lm_head/logits", "model/hidden_states", "draft:model/input_ids"],
    *["draft:lm_head/logits", "draft:model.layers.1.self_attn.attn/output"],
    *["rank-1/rows-00000.safetensors", "rank-2/rows-00000.safetensors", "rank-99999/rows-00000.safetensors"],
    *["model/input_ids@1", "model.layers.0.self_attn.attn/query[0/2]", "a/query[1/2]@3", "a/latent@0/1000"],
    *["model.layers.9999.self_attn.attn/output", "model.layers.0.self_attn.attn/key"],
    *("", LIVE, "\ud800", "a\x00b"),
    *([], {}, [0], [1], [0, 0], [[]], [1, 2, 3], {"a": 1}, [1 << 40, 1 << 40], {"": ""}),
    *({"$nest": 50}, {"$nest": 950}, {"$nest": 100_000}, {"$text": ["9", 5000]}, {"$text": ["x", 100_000]}),
    *({"$list": [1, 100_000]}, {"$list": [[], 50_000]}, {"$list": [LIVE, 20]}, {"$table": [0, 10_000]}),
    *({"$list": [9, 17]}, {"$table": [LIVE, 30]}, {"$list": [(1 << 40), 500]}),
)

NUMBERS = [*range(12), 0x7FC0, 0xFF80, 0x8000]
"""Further elements of tensors: codes, and a NaN, an infinity and a negative zero in bfloat16."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything inside a tree, but for what lies deeper than anything in a capture."""
    if len(path) == DEEPEST:
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@cache
def _paths(name: str, document: str) -> list[tuple[Any, ...]]:
    return list(places(taken_apart(document, base(name).get(document, b""))))


def any_value(rng: random.Random) -> Any:
    """A value that may do harm, or that lies near one."""
    value = rng.choice(VALUES)
    if isinstance(value, int) and rng.random() < 0.2:
        return value + rng.randint(-3, 3)
    return copy.deepcopy(value)  # whoever gets it may alter it


def _random_edit(rng: random.Random, name: str) -> list[Any]:
    files = sorted(base(name))
    kind = rng.choice(["set"] * 10 + ["fill"] * 6 + ["drop", "bytes", "bytes", "cut", "append", "become"])
    trees = [file for file in files if file != LOG]
    if kind in ("set", "drop"):
        document = rng.choice(trees)
        path = list(rng.choice(_paths(name, document) or [("x",)]))
        if rng.random() < 0.1:
            path[-1] = rng.choice([LIVE, "x", 99, "later"])
        if kind == "drop":
            return [kind, document, path]
        if rng.random() < 0.2:  # a value from another place
            found: Any = taken_apart(document, base(name)[document])
            for step in rng.choice(_paths(name, document) or [()]):
                found = found[step]
            return [kind, document, path, found]
        return [kind, document, path, any_value(rng)]
    if kind == "fill":
        shards = [file for file in files if file.endswith(".safetensors")]
        if not shards:
            return ["cut", OPEN, 5]
        shard = rng.choice(shards)
        tensors = [key for key in taken_apart(shard, base(name)[shard]) if key != FACTS]
        number = rng.choice([value for value in VALUES if type(value) is int] + NUMBERS)
        return [kind, shard, rng.choice(tensors), rng.choice([-1, rng.randrange(64)]), number]
    file = rng.choice(files)
    if kind == "become":
        return [kind, file, rng.choice(KINDS_OF_FILE)]
    if kind == "cut":
        return [kind, file, rng.randrange(5000)]
    blob = bytes(rng.choice(b'\x00\xff\x80{}[]",:\n\x1b19') for _ in range(rng.randint(1, 8)))
    return [kind, file, blob.hex()] if kind == "append" else [kind, file, rng.randrange(5000), blob.hex()]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A recipe like another one."""
    recipe = parse(data) or {"base": rng.choice(list(BASES)), "agree": True, "edits": []}
    for _ in range(rng.randint(1, 3)):
        edits, what = recipe["edits"], rng.random()
        if edits and what < 0.2:
            edits.pop(rng.randrange(len(edits)))
        elif edits and what < 0.3:
            edit = rng.choice(edits)
            if edit[0] in ("set", "fill"):
                edit[-1] = any_value(rng) if edit[0] == "set" else rng.randrange(-2, 300)
        elif what < 0.35:
            recipe["agree"] = not recipe["agree"]
        elif what < 0.45:
            recipe["base"] = rng.choice(list(BASES))
        else:
            edits.append(_random_edit(rng, recipe["base"]))
    return json.dumps(recipe).encode()


def clear(folder: Path) -> None:
    """Remove what `cook` made."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in folder.parent.glob(f"{folder.name}-*"):
        path.unlink()
