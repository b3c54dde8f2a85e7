"""What a comment on a pull request is made of, from top to bottom: each part with its evidence."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from localizer.diff.result import DIVERGED, Result, Tokens
from localizer.diff.runs import RunResult
from localizer.report import (
    controls,
    evidence,
    reproduce,
    rows,
    speculation,
    summary,
    text,
    wording,
)
from localizer.report import run as run_report
from localizer.report.archive import left_out_lines
from localizer.report.blocks import MISSING, Block, Bullets, Line, Table
from localizer.report.counts import count
from localizer.report.environment import environment
from localizer.report.gfm import code, fenced, prose
from localizer.report.probes import probed
from localizer.report.safe import clean
from localizer.report.scope import Scope
from localizer.report.scope import scope as diff_scope
from localizer.report.text import limits
from localizer.store.reader import Capture

REQUESTS_SHOWN, SETTINGS_SHOWN, LEFT_OUT_SHOWN, PROBES_SHOWN, REASONS_SHOWN = 100, 500, 12, 8, 12

UNSHOWN = (
    "What the run says of taps, repeats, the witness and runs without taps: the captures behind that are not "
    "all in the archive, which therefore cannot show it."
)

_CAPITAL = re.compile(r"\A(control|repeats)\b")


@dataclass(frozen=True)
class Attachment:
    """The archive, as a comment names it.

    Attributes:
        name: of the file; untrusted.
        size, sha256: bytes, and hex.
        changed: what the whole captures say otherwise, where that is known.
        url: from where it can be fetched; empty where nobody said.
    """

    name: str
    size: int
    sha256: str
    changed: Sequence[str] = ()
    url: str = ""


@dataclass(frozen=True)
class Evidence:
    """What a comment is made of: all of it from the archive.

    Attributes:
        result: the diff of its captures.
        captures: candidate, parent and controls by their names in the archive.
        run: what `localize run` said of its captures; None for captures that were made singly.
        attachment: the archive.
    """

    result: Result
    captures: Mapping[str, Capture]
    run: RunResult | None
    attachment: Attachment

    @property
    def scope(self) -> Scope:
        """What is established and what is not."""
        if self.run is None:
            return diff_scope(self.result)
        found = run_report.scope(self.run)
        return Scope(establishes=found.establishes, does_not_establish=[UNSHOWN, *found.does_not_establish])

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        return wording.headline(self.result) if self.run is None else run_report.headline(self.run)

    @property
    def verdict(self) -> str:
        return (self.run or self.result).verdict


@dataclass(frozen=True)
class Part:
    """A piece of a comment.

    Attributes:
        key: its name in `localizer.report.comment.DROPPED`; empty where it is never left out.
        blocks: what it says.
        literal: Markdown below the blocks, made safe already.
        folded: the title behind which it is folded; empty where it is not.
    """

    key: str
    blocks: Sequence[Block] = ()
    literal: str = ""
    folded: str = ""


def parts(found: Evidence) -> Iterator[Part]:
    """All parts; those that have nothing to say are empty."""
    result, run = found.result, found.run
    yield Part("", [Line(_title(found), "verdict"), Line(found.headline)])
    if result.summary is not None:
        yield Part("", [Line(f"First difference: {summary.sentence(result)}.")])
    reasons = (run or result).reasons
    if reasons:
        told = [f"{wording.reason(item)}." for item in reasons[:REASONS_SHOWN]]
        more = (
            [f"… and {len(reasons) - REASONS_SHOWN:,} more reasons"] if len(reasons) > REASONS_SHOWN else []
        )
        yield Part("", [Bullets([*told, *more])])
    yield Part("", [Bullets(list(_parity(found)))])
    yield Part("repeats and control", _control_and_repeats(result))
    yield Part("probes", [Bullets(list(_probes(found)))])
    yield Part("environment", literal=_environments(found))
    yield Part("parity table", list(text.differing(result.differences)))
    if run is not None:
        yield Part("runs", list(_runs(run)))
    yield Part("", list(limits(found.scope)))
    yield Part("commands", [Line("To make such captures again", "heading")], _commands(found))
    yield from _attachment(found)
    yield from _details(found)


def _title(found: Evidence) -> str:
    """`localizer: diverged, not in the control`."""
    word = f"localizer: {found.verdict}"
    if DIVERGED not in (found.verdict, found.result.verdict):
        return word
    without = "no control" if found.result.controls is None else "no attribution"
    return f"{word}, {summary.CONTROL.get(found.result.attribution, without)}"


def _parity(found: Evidence) -> Iterator[str]:
    if found.run is not None:
        parity = found.run.parity
        how = "with taps" if parity.tapped else "without taps"
        yield f"Token parity, {how}: {_tokens(parity.tokens)}"
        yield f"Token parity of the captures in the archive: {_tokens(found.result.tokens)}"
    else:
        yield f"Token parity: {_tokens(found.result.tokens)}"
    if found.result.speculation is not None:
        yield f"Speculation: {speculation.summary(found.result)}"


def _tokens(tokens: Tokens) -> str:
    """`16/44 requests, 400 positions`, with where it begins."""
    if not tokens.requests:
        return wording.tokens(tokens)
    told = (
        f"{tokens.requests_differ}/{tokens.requests} requests, {count(tokens.positions_differ, 'position')}"
    )
    told += f" of {tokens.positions:,} differ"
    if tokens.requests_unfinished:
        told += f"; {count(tokens.requests_unfinished, 'request')} compared as far as both sides go"
    if tokens.first is not None:
        told += f"; first at request {clean(tokens.first.request)}, position {tokens.first.position}"
    return told


def _probes(found: Evidence) -> Iterator[str]:
    lines = [
        f"Probe in the {name}: {probed(probe)}"
        for name, capture in found.captures.items()
        if capture.manifest is not None
        for probe in capture.manifest.probes
    ]
    yield from lines[:PROBES_SHOWN]
    if len(lines) > PROBES_SHOWN:
        yield f"… and {len(lines) - PROBES_SHOWN:,} more probes"
    if not lines:
        yield "Probes: none, so whether the changed code ran was not recorded"


def _control_and_repeats(result: Result) -> list[Block]:
    told: list[str] = []
    for block in controls.line(result):
        told += [block.text] if isinstance(block, Line) else block.items if isinstance(block, Bullets) else []
    repeats = wording.repeats(result.tokens) or "repeats: none; each capture made one pass"
    lines = [*(told or ["control: none; the parent was not compared with itself"]), repeats]
    return [Bullets([_CAPITAL.sub(lambda it: it[0].capitalize(), line) for line in lines])]


def _environments(found: Evidence) -> str:
    """A list with one line for all captures that ran on the same, in the order of the archive."""
    by_line: dict[str, list[str]] = {}
    for name, capture in found.captures.items():
        by_line.setdefault(environment(capture), []).append(name)
    lines = [
        f"- {'Environment' if len(by_line) == 1 else prose(' and '.join(names[:3]).capitalize())}: {told}"
        for told, names in by_line.items()
    ]
    changed = [name for name, capture in found.captures.items() if capture.open.intervention is not None]
    if changed:
        lines.append(
            f"- Changed while it ran, by localize intervene: the source of {' and '.join(changed[:3])}"
        )
    return "\n".join(lines)


def _runs(run: RunResult) -> Iterator[Block]:
    yield Line("What the runs say of each other", "heading")
    yield Bullets(list(run_report.said(run)))
    yield from run_report.witnessed(run)


def _commands(found: Evidence) -> str:
    return fenced(reproduce.commands(found.captures), "sh")


def _attachment(found: Evidence) -> Iterator[Part]:
    it = found.attachment
    left_out = left_out_lines(_left_out(found.captures))
    if len(left_out) > LEFT_OUT_SHOWN:
        more = len(left_out) - LEFT_OUT_SHOWN
        left_out = [*left_out[:LEFT_OUT_SHOWN], f"{more:,} more, which README.txt in the archive lists"]
    if it.changed:
        left_out.append(f"the whole captures say otherwise of: {', '.join(it.changed)}")
    yield Part("", [Line("Attachment", "heading")], _attached(it))
    yield Part("", [Bullets([clean(line, 600) for line in left_out or ["nothing was left out"]])])
    name = f"./{it.name}" if it.name.startswith("-") else it.name
    further = "".join(f" --control {shlex.quote(f'{name}:{key}')}" for key in list(found.captures)[2:6])
    verify = (
        f"localize verify {shlex.quote(name)} && localize diff {shlex.quote(f'{name}:candidate')} "
        f"{shlex.quote(f'{name}:parent')}{further}"
    )
    yield Part(
        "",
        [Line("Check it, and compare again; neither a GPU nor torch nor vLLM is needed:")],
        fenced(verify, "sh"),
    )


def _attached(it: Attachment) -> str:
    where = f" ([download](<{it.url}>))" if it.url else ""
    return f"{code(it.name)}{where}, {prose(count(it.size, 'byte'))}, SHA-256 {code(it.sha256)}"


def _left_out(captures: Mapping[str, Capture]) -> dict[str, list[str]]:
    reduced = {name: capture.open.reduced for name, capture in captures.items()}
    return {name: [] if mark is None else list(mark.left_out) for name, mark in reduced.items()}


def _details(found: Evidence) -> Iterator[Part]:
    result = found.result
    detail: list[tuple[str, str, Callable[[], Iterator[Block]]]] = [
        ("evidence", "The first difference in full", lambda: _first(result)),
        ("sites", "Sites, in execution order", lambda: evidence.sites_table(result)),
        ("rows", "Rows that differ at the first site", lambda: rows.blocks(result)),
        ("requests", "First difference of each request", lambda: _requests(result)),
        ("histogram", "Where requests first differ", lambda: evidence.histogram(result)),
        ("controls", "Controls", lambda: controls.blocks(result)),
        ("captures", "Captures", lambda: _captures(found)),
        ("coverage", "Coverage", lambda: iter([Bullets(list(text.coverage(result)))])),
        ("settings", "All settings that differ", lambda: _settings(result)),
    ]
    for key, title, blocks in detail:
        yield Part(key, [it for it in blocks() if not _is_heading(it)], folded=title)


def _is_heading(block: Block) -> bool:
    return isinstance(block, Line) and block.role == "heading"


def _first(result: Result) -> Iterator[Block]:
    yield from text.finding(result)
    yield from evidence.target(result)
    yield from evidence.flip_and_signatures(result)


def _requests(result: Result) -> Iterator[Block]:
    """The table of requests; nothing where only one differs, which is told above."""
    if len(result.requests) < 2:
        return
    cells = [
        [
            clean(it.request),
            clean(it.first.site),
            str(it.first.position),
            clean(it.first.kind),
            it.first.class_ or MISSING,
        ]
        for it in result.requests[:REQUESTS_SHOWN]
    ]
    yield Table(["request", "first site", "position", "kind", "class"], cells, frozenset({2}))
    if len(result.requests) > REQUESTS_SHOWN:
        yield Line(f"… and {len(result.requests) - REQUESTS_SHOWN:,} more")


def _captures(found: Evidence) -> Iterator[Block]:
    cells = []
    for name, capture in found.captures.items():
        facts = capture.open
        told = [name, clean(capture.label), clean(facts.source.vllm), capture.state, clean(facts.created)]
        cells.append(told)
    yield Table(["in the archive", "capture", "vLLM", "state", "created"], cells)


def _settings(result: Result) -> Iterator[Block]:
    """All differing settings, where the table above cannot hold them."""
    if len(result.differences) > text.SETTINGS_SHOWN:
        yield from text.differing(result.differences, SETTINGS_SHOWN)
