"""Evidence for comments, made of synthetic captures by way of an archive, as `localize attach` makes it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from builders import Plan, write
from cases import CASES, PARENTS

from localizer.report import history
from localizer.report.parts import Evidence
from localizer.run.attach import attach
from localizer.run.attached import read
from localizer.store.reader import Capture

CHANGING = re.compile(r"[0-9a-f]{64}|((?<=<path )|(?<=<path` `))[0-9a-f]{8}|[0-9,]+(?= bytes, SHA)")


def stable(comment: str) -> str:
    """What a reader sees of a comment, without what changes with times, folders and an archive's bytes."""
    return CHANGING.sub("...", history.RECORDS.sub("", comment))


HOSTILE_NAME = "x` @octocat #1 | <b>.zip"


def plans(name: str) -> list[Plan]:
    """Candidate, parent and controls of a case."""
    if name in PARENTS:
        changes, controls = PARENTS[name]
        further = [Plan(**{"name": f"parent-{number}"} | more) for number, more in enumerate(controls, 2)]
        return [Plan(**{"name": "candidate"} | changes), Plan(name="parent"), *further]
    plan, changes = CASES[name]
    return [dataclasses.replace(plan, name="candidate", **changes), dataclasses.replace(plan, name="parent")]


def packed(root: Path, made: Sequence[Plan], name: str = "x.zip", *, redact: bool = True) -> Evidence:
    """The evidence of captures in an archive `name` below `root`."""
    captures = [Capture(write(root, plan)) for plan in made]
    result = attach(*captures[:2], captures[2:], root / name, limit=25_000_000, redact=redact)
    return read(result.path, result.changed)
