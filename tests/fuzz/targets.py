"""What is fuzzed. An input may be read, or refused in one sentence; nothing else may happen."""

from __future__ import annotations

import io
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altered
import msgspec

from fuzz import recipes
from localizer.diff import diff, diff_within
from localizer.diff.result import Result
from localizer.errors import LocalizerError
from localizer.report import captures
from localizer.report.formats import BINARY, SUFFIXES, render
from localizer.report.safe import clean
from localizer.store import tensors
from localizer.store.reader import Capture
from localizer.store.verify import verify

LONGEST_SENTENCE = 4000
"""Characters of an error."""

Mutate = Callable[[bytes, int], bytes]


@dataclass(frozen=True)
class Target:
    """One way in.

    Attributes:
        use: does with an input whatever localizer does with such a thing.
        mutate: makes an input like another one; what is left to bytes is done by the function it is given.
        longest: the longest input, bytes.
    """

    use: Callable[[bytes, Path], None]
    mutate: Callable[[bytes, random.Random, Mutate], bytes]
    longest: int


@contextmanager
def refusing() -> Iterator[None]:
    """Lets a refusal pass, if it is one sentence."""
    try:
        yield
    except LocalizerError as error:
        sentence = str(error)
        assert sentence, "an error without a sentence"
        assert len(sentence) <= LONGEST_SENTENCE, f"an error of {len(sentence)} characters"
        dead(sentence, "")
        assert dead(clean(sentence, LONGEST_SENTENCE), "") == sentence, "an error that would be escaped"


def dead(text: str, allowed: str = "\n") -> str:
    """Check that nothing in a text can steer a terminal."""
    live = {character for character in text if not (character.isprintable() or character in allowed)}
    assert not live, f"live characters: {live!r}"
    return text


# -- one safetensors file ---------------------------------------------------------------------------------


def use_tensors(data: bytes, scratch: Path) -> None:
    """Read every tensor of a file."""
    path = scratch / "file"
    path.write_bytes(data)
    with refusing():
        file = tensors.TensorFile(path)
        for name in file.names():
            array = file.array(name)
            assert name in file
            assert (array.shape, str(array.dtype)) == (file.shape(name), file.dtype(name))
            assert array.nbytes <= len(data)
            array.tobytes()


def mutate_tensors(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    """Other values in the header, with a length that fits; or other bytes."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        return mutate(data, 1 << 12)
    if rng.random() < 0.3:
        return mutate(data, 1 << 12)
    text = recipes.dump(_another(header, rng))
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


# -- the JSON documents -----------------------------------------------------------------------------------


def use_documents(data: bytes, scratch: Path) -> None:
    """Open a capture with one document replaced: the first line is its name, the rest its content."""
    name, _, content = data.partition(b"\n")
    document = name.decode("latin-1")
    if document not in recipes.DOCUMENTS:
        return
    files = recipes.base("complete" if document == recipes.MANIFEST else "killed") | {document: content}
    folder = scratch / "capture"
    recipes.lay(files, folder)
    try:
        with refusing():
            capture = Capture(folder)
            capture.check()
            look(capture)
    finally:
        recipes.clear(folder)


def mutate_documents(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    """Another value at some place of the document; or other bytes."""
    name, _, content = data.partition(b"\n")
    tree = recipes.taken_apart(name.decode("latin-1"), content)
    if tree is None or rng.random() < 0.3:
        return name + b"\n" + mutate(content, 1 << 13)
    tree = _another(tree, rng)
    if name.decode() == recipes.JOURNAL and isinstance(tree, list):
        return name + b"\n" + b"".join(recipes.dump(line) + b"\n" for line in tree)
    return name + b"\n" + recipes.dump(tree)


def _another(tree: Any, rng: random.Random) -> Any:
    """A tree with one to three values replaced, moved or dropped."""
    for _ in range(rng.randint(1, 3)):
        paths = list(recipes.places(tree))
        if not paths:
            return recipes.any_value(rng)
        path = rng.choice(paths)
        holder: Any = tree
        for step in path[:-1]:
            holder = holder[step]
        what = rng.random()
        if what < 0.15:
            del holder[path[-1]]
        elif what < 0.3:
            found: Any = tree
            for step in rng.choice(paths):
                found = found[step]
            holder[path[-1]] = json.loads(recipes.dump(found)) if len(recipes.dump(found)) < 1000 else 0
        elif what < 0.4 and isinstance(holder, dict):
            holder[rng.choice([recipes.LIVE, "", "later", "\ud800"])] = holder.pop(path[-1])
        else:
            value = recipes.any_value(rng)
            short = isinstance(value, dict) and rng.random() < 0.7
            holder[path[-1]] = value if short else recipes.expand(value)
    return tree


# -- a whole capture --------------------------------------------------------------------------------------


def use_captures(data: bytes, scratch: Path) -> None:
    """Whatever localizer does with a capture, on one that a recipe altered, and with what it was before."""
    recipe = recipes.parse(data)
    if recipe is None:
        return
    root = scratch / "captures"
    folder, sound = root / "candidate" / "0001", scratch / recipe["base"] / "0001"
    if not sound.exists():
        recipes.lay(recipes.base(recipe["base"]), sound)
    recipes.clear(folder)
    try:
        recipes.cook(recipe, folder)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError, RecursionError):
        recipes.clear(folder)  # not a recipe
        return
    dead(captures.history(root))
    with refusing():
        result = verify(folder)
        dead(captures.verification(folder, result))
        assert all(dead(reason, "") for reason in result.reasons if result.state == "damaged")
    with refusing():
        look(Capture(folder))
    with refusing():
        capture = Capture(folder)
        capture.check()
        for site in capture.sites:
            for row in {0, len(capture.table) - 1}:
                capture.row_payload(site.name, row)
    for pair in ((folder, sound), (sound, folder), (folder, folder)):
        with refusing():
            shown(diff(*map(Capture, pair), explain=True, cells=True))
    with refusing():
        shown(diff(Capture(sound), Capture(sound), [Capture(folder)]))
    with refusing():
        shown(diff(Capture(sound), Capture(folder), [Capture(_copy(sound, scratch))]))
    with refusing():
        shown(diff_within(Capture(folder), explain=True, cells=True))


def _copy(sound: Path, scratch: Path) -> Path:
    """A second capture like `sound`: of another number, so that it may be a control."""
    folder = scratch / "control" / sound.parent.name
    if not folder.exists():
        shutil.copytree(sound, folder)
        document = json.loads((folder / "open.json").read_text()) | {"number": 2}
        (folder / "open.json").write_text(json.dumps(document))
        altered.describe(folder)
    return folder


def shown(found: Result) -> None:
    """Print a result in every form that is text."""
    for form in SUFFIXES.keys() - BINARY:
        stream = io.StringIO()
        render(form, found, stream)
        dead(stream.getvalue())
        if form == "json":
            assert stream.getvalue().isascii()


def look(capture: Capture) -> None:
    """What `show` does, and a reader of requests, prompts and tokens."""
    _ = capture.label, capture.complete, capture.reasons, capture.requests, capture.prompts
    dead(captures.details(capture))
    assert dead(json.dumps(msgspec.to_builtins([capture.open, capture.manifest]), indent=2)).isascii()
    _ = capture.outputs


def mutate_captures(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    """Other edits of the recipe."""
    return mutate(data, 1 << 12) if rng.random() < 0.05 else recipes.mutated(data, rng)


TARGETS = {
    "tensors": Target(use_tensors, mutate_tensors, 1 << 16),
    "documents": Target(use_documents, mutate_documents, 1 << 18),
    "captures": Target(use_captures, mutate_captures, 1 << 13),
}
