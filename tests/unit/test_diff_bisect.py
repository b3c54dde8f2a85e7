"""What `git bisect run` is told: bad only where a difference is shown to be the candidate's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import bump
from doubles import FAULT, OTHER_TOKEN, QUERY, Making, Vllm, candidates, going

from localizer.diff.bisect import BAD, GOOD, SKIP, judge
from localizer.report.run import skipped
from localizer.run.config import Config

OTHERWISE: dict[str, Any] = {"changes": {QUERY: bump(ulps=3)}}


def by_name(**changes: dict[str, Any]) -> Making:
    """Changes by capture, with underscores for hyphens; those of `candidate` are for all of its runs."""

    def makes(name: str, number: int) -> dict[str, Any]:
        side = changes.get("candidate", {}) if name.startswith("candidate") else {}
        return side | changes.get(name.replace("-", "_"), {})

    return makes


@pytest.mark.parametrize(
    ("makes", "passes", "code", "why"),
    [
        (candidates(), {}, GOOD, ""),
        (candidates(**FAULT), {}, BAD, ""),
        (by_name(candidate=FAULT, parent_2=OTHERWISE), {}, SKIP, "the parent differs from itself there too"),
        (candidates(**FAULT), {"controls": 0}, BAD, ""),
        (candidates(**FAULT), {"compile_cache": "shared"}, SKIP, "no control shows whose"),
        (by_name(candidate_untapped=OTHER_TOKEN), {}, SKIP, "no control shows whose"),
        (by_name(candidate_untapped_2=OTHER_TOKEN), {}, SKIP, "a source does not repeat itself"),
        (by_name(candidate_2=FAULT), {}, SKIP, "the answer is inconclusive"),
    ],
    ids=["equal", "fault", "noise", "uncontrolled", "shared", "tokens", "unsteady", "inconclusive"],
)
def test_a_commit(
    config: Config, tmp_path: Path, makes: Making, passes: dict[str, Any], code: int, why: str
) -> None:
    compiled = msgspec.structs.replace(config, engine={}, run=msgspec.structs.replace(config.run, **passes))
    found, _ = going(compiled, tmp_path, Vllm(makes))
    assert judge(found) == code
    if code == SKIP:
        assert why in skipped(found)
