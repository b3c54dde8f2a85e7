"""What `git bisect run` is told of a commit: good, bad, or that it shows neither."""

from __future__ import annotations

from localizer.diff import verdict
from localizer.diff.attribution import CANDIDATE_ONLY
from localizer.diff.result import DIVERGED, IDENTICAL, PARENT
from localizer.diff.runs import RunResult

GOOD, BAD, SKIP = 0, 1, 125
"""Exit codes as `git bisect run` reads them."""


def judge(result: RunResult) -> int:
    """The exit code for the candidate's commit.

    It is bad where a difference is shown to be its own; without controls, whose absence then was asked for,
    any difference is taken as that. It is good where nothing differs and both sources repeat themselves: a
    source that does not may be equal by chance.
    """
    if result.verdict == DIVERGED:
        controlled = any(item.source == PARENT for item in result.repeats)
        return BAD if result.attribution == CANDIDATE_ONLY or not controlled else SKIP
    unsteady = {verdict.SOURCE_UNSTEADY, verdict.NOT_REPRODUCIBLE} & {it.code for it in result.reasons}
    return GOOD if result.verdict == IDENTICAL and not unsteady else SKIP
