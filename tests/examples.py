"""The examples in docs/, and the commands that their README gives for them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "examples"
ARCHIVE = FOLDER / "smollm2.zip"
README = (FOLDER / "README.md").read_text()

WORDING = frozenset({"scope", "text"})
"""Keys of a result under which sentences are, which may be said better than when the archive was made."""

Done = subprocess.CompletedProcess[str]


def commands(part: str) -> list[list[str]]:
    """The words of all commands in a part of the README."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for line in "".join(blocks).splitlines()]


CHECKING, MAKING = map(commands, README.split("\n## How the archive was made\n"))


def run(localize: Sequence[str], folder: Path, environment: Mapping[str, str] | None) -> dict[str, Done]:
    """Run the commands that check the archive, by their names, where nothing else is; diff also as JSON."""
    copy = folder / ARCHIVE.relative_to(ROOT)
    copy.parent.mkdir(parents=True)
    shutil.copy(ARCHIVE, copy)
    asked = {words[1]: words[1:] for words in CHECKING}
    asked["json"] = [*asked["diff"], "--format", "json"]
    return {
        name: subprocess.run(
            [*localize, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        for name, words in asked.items()
    }


def recorded() -> Any:
    """The result of the machine that made the archive."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        return json.loads(archive.read("result.json"))


def unlike(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Where `new` does not say what `old` says; wording, paths and what only `new` has are passed over."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() - WORDING - {"path"}:
            yield from unlike(old[key], new[key], f"{where}.{key}") if key in new else [f"{where}.{key}"]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from unlike(one, other, f"{where}[{number}]")
    elif old != new:
        yield where
