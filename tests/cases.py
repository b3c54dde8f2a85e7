"""Pairs of synthetic captures that reports are shown on, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from builders import Plan, attention, bump, drafted, pair, put, toy_token, write

from localizer.diff import diff, diff_within
from localizer.diff.result import Result
from localizer.store.reader import Capture
from localizer.wire.spec import LOGITS

PROMPTS = ((1, 2, 3), (4, 5, 6), (7, 8, 9))
LATE = "r02.02"
BASE = Plan(layers=32, prompts=PROMPTS, matrix=(1, 2, 3), repeats=1)
SPECULATING = Plan(
    layers=4, prompts=PROMPTS, matrix=(1, 3), max_tokens=12, speculate=3, draft_files={"model": "cd34"}
)


CODE = {
    attention(1, part): f"vllm/model_executor/models/llama.py:{line} LlamaAttention.forward"
    for line, part in enumerate(("query", "key", "value", "output"), 229)
}


def _flipped() -> dict[str, object]:
    """The query of layer 18 differs by one unit, then everything below it, until the argmax flips."""
    changes = {
        (LATE, 4, attention(layer, kind)): bump((0, 1) if kind != "output" else (3,), 1 + layer - 18)
        for layer in range(18, 32)
        for kind in ("query", "key", "value", "output")
    }
    changes[LATE, 4, LOGITS] = put(9.0, (0,))
    first = toy_token([7, 8, 9])
    second = toy_token([7, 8, 9, first])
    return {"changes": changes, "outputs": {LATE: [first, second, 0, 5]}}


CASES: dict[str, tuple[Plan, dict[str, object]]] = {
    "diverged": (BASE, _flipped() | {"engine": {"block_size": 32}, "overlay": {"v1/attention.py": "ab12"}}),
    "attention": (
        Plan(repeats=2, manifested={"code": CODE}),
        {"changes": {("r01.00", 4, attention(1, "output")): put(float("nan"))}},
    ),
    "identical": (BASE, {}),
    "tokens": (Plan(only_tokens=True), {"outputs": {"r01.01": [2, 15, 15, 15]}}),
    "killed": (Plan(), {"manifest": False, "absent": frozenset({("r01.00", 5, attention(2, "key"))})}),
    "selected": (
        Plan(layers=(0, 7), observed="0,7", payload=frozenset()),
        {"changes": {("r01.00", 4, attention(7, "key")): bump()}},
    ),
    "batches": (
        BASE,
        {
            "changes": {
                (f"r02.0{index}", position, attention(4, "query")): bump((1, 2))
                for index, position in enumerate((0, 0, 1))
            }
            | {("r02.02", 0, attention(4, "key")): bump((0, 0), 2)},
        },
    ),
    "models": (Plan(model_files={"a.safetensors": "aa"}), {"model_files": {"a.safetensors": "bb"}}),
    "workloads": (Plan(), {"matrix": (2, 2), "changes": {("r00.01", 4, attention(1, "query")): bump()}}),
    "draft": (
        SPECULATING,
        {
            "changes": {("r01.01", 9, drafted(attention(4, "query"), 1)): bump((2, 1), 3)},
            "overlay": {"v1/spec_decode/eagle.py": "ab12"},
        },
    ),
    "rank": (
        Plan(prompts=PROMPTS, matrix=(1, 2, 3), ranks=2),
        {
            "changes": {
                (f"r02.0{index}", 2, f"{attention(1, 'output')}[1/2]"): bump((3,), 1 + index)
                for index in range(3)
            }
        },
    ),
    "other-ranks": (Plan(ranks=2), {"ranks": 1, "engine": {"tensor_parallel_size": 1}}),
    "speculation": (
        dataclasses.replace(SPECULATING, speculate=0),
        {"speculate": 3, "engine": {"speculative_config": {"num_speculative_tokens": 3}}},
    ),
    "hostile": (
        Plan(state="incomplete", reasons=("\x1b[2J[red]gone[/red]\u202e\nline",)),
        {"engine": {"\x9b31m[bold]x": "\x07\u2028[/]"}, "vllm": "\x1b]0;title\x07"},
    ),
}


PARENTS: dict[str, tuple[dict[str, object], list[dict[str, object]]]] = {
    "candidate-only": (
        {"changes": {("r01.00", 4, attention(1, "query")): bump()}},
        [{"changes": {("r01.01", 4, attention(2, "query")): bump()}}],
    ),
    "also-in-control": (
        {"changes": {(name, 4, attention(1, "query")): bump() for name in ("r01.00", "r01.01")}},
        [{}, {"changes": {("r01.00", 4, attention(1, "query")): bump((1, 2), 7)}}],
    ),
    "upstream": (
        {"changes": {("r01.00", 4, attention(1, "query")): bump()}},
        [{"changes": {("r01.00", 3, attention(2, "output")): bump()}}],
    ),
    "no-attribution": (
        {"changes": {("r01.00", 4, attention(1, "query")): bump()}},
        [
            {"manifest": False},
            {"vllm": "0.31.0", "engine": {"block_size": 32}},
            {"layers": (0, 2), "observed": "0,2"},
            {"matrix": (2, 2)},
        ],
    ),
}
"""What candidate and controls do otherwise than the parent."""

WITHIN: dict[str, dict[str, object]] = {
    "within-diverged": {
        "prompts": ((1, 2, 3), (4, 5, 6), (1, 2, 3)),
        "matrix": (1, 3),
        "changes": {("r01.00", 4, attention(1, "output")): bump()},
        "outputs": {"r01.02": [toy_token([1, 2, 3]), 0, 5, 6]},
    },
    "within-identical": {"matrix": (1, 2), "repeats": 2},
    "within-speculation": {
        "matrix": (1, 2),
        "speculate": 3,
        "max_tokens": 8,
        "changes": {("r01.00", 3, drafted(attention(3, "query"), 2)): bump()},
    },
    "within-nothing": {"matrix": (2,), "manifest": False},
}
"""Captures that are compared with themselves."""


def controlled(name: str, root: Path, *, explain: bool = False, cells: bool = False) -> Result:
    """Write candidate, parent and controls of a case under `root` and compare them."""
    candidate, controls = PARENTS[name]
    one, other = pair(root, Plan(), **candidate)
    plans = [Plan(**{"name": f"parent-{number}"} | more) for number, more in enumerate(controls, 2)]
    captures = [Capture(write(root, plan)) for plan in plans]
    return diff(Capture(one), Capture(other), captures, explain=explain, cells=cells)


def within(name: str, root: Path, *, explain: bool = False, cells: bool = False) -> Result:
    """Write the capture of a case under `root` and compare it with itself."""
    return diff_within(Capture(write(root, Plan(**WITHIN[name]))), explain=explain, cells=cells)


def explained(name: str, root: Path) -> Result:
    """The result of a case of `CASES`, with its plan."""
    plan, candidate = CASES[name]
    one, other = pair(root, plan, **candidate)
    return diff(Capture(one), Capture(other), explain=True)


def result(name: str, root: Path, *, cells: bool = False) -> Result:
    """Write the captures of a case under `root` and compare them."""
    plan, candidate = CASES[name]
    one, other = pair(root, plan, **candidate)
    return diff(Capture(one), Capture(other), cells=cells)


Made = Callable[[str], Result]
"""Gives the result of a case by its name; behind `plan ` with the plan."""


def any_result(name: str, root: Path) -> Result:
    """The result of a case of any kind; see `Made`."""
    bare = name.removeprefix("plan ")
    if bare in WITHIN:
        return within(bare, root, explain=bare != name)
    if bare in PARENTS:
        return controlled(bare, root)
    return result(name, root) if bare == name else explained(bare, root)
