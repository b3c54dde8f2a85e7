"""Remake the committed example pair, captures/candidate/0001 and captures/parent/0001.

    .venv/bin/python scripts/make_example.py

The captures are made by the commands of `localize demo`, smaller and with every row kept; then absolute
paths, host and user names in their texts are replaced by placeholders, and the
manifests are brought up to date.
"""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

import localizer
from localizer.cache import cache_folder
from localizer.capture.finish import describe
from localizer.sources.fault import in_layer, plant
from localizer.sources.interpreter import probe
from localizer.store import schema
from localizer.store.schema import Manifest, Open
from localizer.store.verify import SOUND, verify

LAYER = 4
WORKLOAD = (
    *("--model", "tiny", "--seed", "43", "--matrix", "1,4", "--repeats", "1"),
    *("--prompt-tokens", "6", "--max-tokens", "6"),
    *("--payload", "all", "--engine", "enforce_eager=true", "--engine", "kv_cache_memory_bytes=268435456"),
    *("--env", "VLLM_ENABLE_V1_MULTIPROCESSING=0"),
)


def placeholders(work: Path) -> dict[str, str]:
    """What must not be published -> what stands for it, longest first."""
    found = {
        str(work): "/WORK",
        tempfile.gettempdir(): "/TMP",
        str(cache_folder()): "/CACHE",
        str(Path(sys.prefix)): "/VENV",
        str(Path(sys.base_prefix)): "/PYTHON",
        str(Path(localizer.__file__).parent.parent): "/LOCALIZER",
        str(Path.home()): "/HOME",
        platform.node(): "HOST",
        platform.platform(): platform.system(),
    }
    user = getpass.getuser()
    if user != "root":
        found[user] = "USER"
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def scrub(folder: Path, replaced: dict[str, str]) -> None:
    """Put placeholders into the texts of a capture and describe them anew in its manifest."""
    for name in (schema.OPEN, schema.MANIFEST, schema.LOG):
        text = (folder / name).read_text()
        for secret, placeholder in replaced.items():
            text = text.replace(secret, placeholder)
        (folder / name).write_text(text)
    opening = schema.decode(folder / schema.OPEN, Open)
    environment = {key: value for key, value in opening.environment.items() if key.startswith("VLLM_")}
    opening = msgspec.structs.replace(opening, environment=environment)
    (folder / schema.OPEN).write_bytes(schema.encode(opening))
    manifest = schema.decode(folder / schema.MANIFEST, Manifest)
    texts = (schema.OPEN, schema.LOG)
    files = [describe(folder, file.name) if file.name in texts else file for file in manifest.files]
    (folder / schema.MANIFEST).write_bytes(schema.encode(msgspec.structs.replace(manifest, files=files)))


def main() -> None:
    """Make both captures, scrub them, verify them, and put them in their place."""
    root = Path(__file__).resolve().parent.parent / "captures"
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch).resolve()
        plant(work / "overlay", probe(sys.executable, dict(os.environ)).vllm_location, in_layer(LAYER))
        for name, options in (("parent", ()), ("candidate", ("--overlay", str(work / "overlay")))):
            command = [sys.executable, "-m", "localizer", "capture", name, *WORKLOAD, *options]
            subprocess.run([*command, "--out", str(work)], check=True)
            folder = work / name / "0001"
            scrub(folder, placeholders(work))
            assert verify(folder).state == SOUND
            shutil.rmtree(root / name / "0001", ignore_errors=True)
            shutil.copytree(folder, root / name / "0001")


if __name__ == "__main__":
    main()
