"""What goes into the archive of a run, and what an archive says: evidence for a comment, as a stranger's."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from localizer.diff import diff
from localizer.diff import verdict as verdicts
from localizer.diff.result import CANDIDATE, INCONCLUSIVE, PARENT, Result
from localizer.diff.runs import DIFFERS, SCHEMA, RunFacts, RunResult
from localizer.diff.verdict import EXIT_CODES
from localizer.errors import DamagedCapture, LocalizerError, NotACapture
from localizer.report.history import MARKER
from localizer.report.parts import Attachment, Evidence
from localizer.run.attach import RUN
from localizer.store import output, runs, schema, strict
from localizer.store.archive import Archive, check
from localizer.store.names import NAME, load
from localizer.store.reader import Capture

SIDES = CANDIDATE, PARENT
URL = re.compile(r"https?://[A-Za-z0-9._~:/?#@!$&*+,;=%-]{1,2000}", re.ASCII)
CONTROL = re.compile(r"control-[1-9]\d{0,3}", re.ASCII)


@dataclass(frozen=True)
class OfRun:
    """The captures whose diff a run reports, and what it said beside."""

    candidate: Capture
    parent: Capture
    controls: list[Capture]
    facts: RunFacts


class _Label(msgspec.Struct, frozen=True):
    label: str


class _Sides(msgspec.Struct, frozen=True):
    candidate: _Label
    parent: _Label


class _Controls(msgspec.Struct, frozen=True):
    captures: list[_Label]


class _Diff(msgspec.Struct, frozen=True):
    """Of the diff in a run's result: which captures it is of."""

    captures: _Sides
    controls: _Controls | None = None


def of_run(root: Path, number: int | None) -> OfRun:
    """Find the captures of a finished run, the newest unless a number is given.

    Raises:
        NotACapture: there is no such run.
        DamagedCapture: its records cannot be read, or a capture is not the one of the run any more.
        LocalizerError: it is not finished.
    """
    there = {int(folder.name): folder for folder in runs.folders(root)}
    if not there:
        raise NotACapture(f"{root} holds no runs; make one with localize run, or name two captures.")
    if number is not None and number not in there:
        listed = ", ".join(map(str, there))
        raise NotACapture(f"There is no run {number} in {root}; there are: {listed}.")
    run = runs.RunFolder(root, there[max(there) if number is None else number])
    if not (run.folder / runs.RESULT).exists():
        raise LocalizerError(f"{run.folder} is not finished; give the same localize run command again.")
    try:
        tree = strict.loads(schema.read(run.folder / runs.RESULT))
        which = msgspec.convert(tree["diff"], _Diff)
        facts = _facts(tree)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCapture(
            f"{run.folder / runs.RESULT} is no result of a run ({str(error)[:200]}); run again with --fresh."
        ) from None
    labels = [
        which.captures.candidate,
        which.captures.parent,
        *(which.controls.captures if which.controls else []),
    ]
    captures = [_capture(run, label.label) for label in labels]
    return OfRun(captures[0], captures[1], captures[2:], facts)


def _capture(run: runs.RunFolder, label: str) -> Capture:
    made = {f"{done.step}/{done.number:04d}": done for done in run.done}
    if label in made:
        capture = load(run.root, label)
        if runs.digest(capture) == made[label].manifest:
            return capture
    raise DamagedCapture(
        f"{label} is not the capture that {run.folder} was made of; start the run again with --fresh."
    )


def _facts(tree: Any) -> RunFacts:
    """What a run said, without what its captures hold: chosen tokens, and texts kept from them.

    Raises:
        ValueError, TypeError, KeyError: it is no result of a run.
    """
    if (tree["kind"], tree["schema"]) != ("run", SCHEMA):
        raise ValueError("of another kind or version")
    first = tree["parity"]["first"]
    for side in SIDES if first is not None else ():
        first[side] = {"token": None, "top": None}
    for reason in tree["reasons"]:
        reason["detail"] = "its own records say why" if reason["detail"] else ""
    facts = msgspec.convert(tree | {"probes": []}, RunFacts)
    repetitions = [*facts.untapped, *facts.observer, *facts.repeats]
    if facts.verdict not in EXIT_CODES or not {it.differs for it in repetitions} <= DIFFERS:
        raise ValueError("words that localizer does not know")
    if len(facts.observer) > len(SIDES):
        raise ValueError("more observers than sources")
    return facts


def read(path: Path, changed: Sequence[str] = (), url: str = "") -> Evidence:
    """What an archive says: its captures are checked, and compared again.

    Args:
        path: of the archive.
        changed: what the whole captures say otherwise, where that is known.
        url: from where it can be fetched.

    Raises:
        NotACapture: it holds no candidate and parent.
        DamagedCapture: it is not what its checksums and records say.
    """
    archive = Archive(path)
    check(archive)
    names = archive.captures
    if names[:2] != list(SIDES) or not all(CONTROL.fullmatch(name) for name in names[2:]):
        raise NotACapture(
            f"{archive.shown} holds no candidate and parent; name one that localize attach made."
        )
    captures = {name: archive.load(name) for name in names}
    result = diff(captures["candidate"], captures["parent"], [captures[name] for name in names[2:]])
    run = None
    if RUN in archive.members:
        try:
            run = _run(_facts(strict.loads(archive.blob(RUN, schema.MAX_DOCUMENT))), result)
        except (ValueError, KeyError, TypeError) as error:
            raise archive.damaged(f"{RUN} is no result of a run ({str(error)[:80]})") from None
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    it = Attachment(path.name, path.stat().st_size, digest, changed, url)
    return Evidence(result, captures, run, it)


def _run(facts: RunFacts, result: Result) -> RunResult:
    """What a run said, around the diff of its captures as they are here; it may only say less than that diff.

    Raises:
        ValueError: its verdict does not follow from its own facts and the diff.
    """
    of = {code: [it for it in facts.reasons if it.code == code] for code in verdicts.REASONS}
    follows, _ = verdicts.untrusted(
        result.verdict,
        result.reasons,
        facts.parity,
        facts.untapped,
        facts.observer,
        facts.repeats,
        facts.witness,
        unpinned=of[verdicts.NOT_PINNED],
        unfinished_again=of[verdicts.RUN_UNFINISHED],
    )
    if facts.verdict not in (follows, INCONCLUSIVE):
        raise ValueError(f"it says {facts.verdict} where the captures say {follows}")
    said = {(it.code, it.source) for it in facts.reasons}
    unsaid = [it for it in result.reasons if (it.code, it.source) not in said]
    fields = {name: getattr(facts, name) for name in facts.__struct_fields__}
    return RunResult(
        **fields | {"reasons": [*facts.reasons, *unsaid]},
        first=result.first,
        differences=result.differences,
        diff=result,
        first_pass=result,
    )


def file_name(candidate: Capture, parent: Capture) -> Path:
    """CANDIDATE-PARENT.zip, in this folder whatever a stranger's capture is called."""
    names = (it.open.name for it in (candidate, parent))
    plain = [name if NAME.fullmatch(name) else side for name, side in zip(names, SIDES, strict=True)]
    return Path(f"{'-'.join(plain)}.zip")


def checked_url(url: str) -> str:
    """An address that may stand in a comment.

    Raises:
        LocalizerError: it is none, or holds what could end the link.
    """
    if url and not URL.fullmatch(url):
        raise LocalizerError(
            "--attachment-url must be an http or https address without spaces, quotes or brackets."
        )
    return url


def keep(path: Path, text: str) -> Path:
    """Write a comment; only one of localizer's own is replaced.

    Raises:
        LocalizerError: there is another file of that name.
        OSError: it cannot be written.
    """
    if path.is_file():
        with path.open("rb") as handle:
            if handle.read(len(MARKER)) != MARKER.encode():
                raise LocalizerError(
                    f"{path} is there and no comment of localizer; name another with --comment."
                )
    output.write(path, text.encode())
    return path
