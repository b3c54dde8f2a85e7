"""What is said about archives: the line after `localize attach`, and the page inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from localizer.diff.result import Result
from localizer.report.safe import clean


def made(
    path: Path, size: int, sha256: str, left_out: Mapping[str, Sequence[str]], changed: Sequence[str]
) -> str:
    """What `localize attach` prints: the archive in one line, then what is not in it."""
    lines = [f"{clean(str(path), 4000)}: {size:,} bytes, SHA-256 {sha256}"]
    return "\n".join([*lines, *(f"  {line}" for line in left_out_lines(left_out)), *_changed(changed)])


def commented(path: Path, text: str, archive: Path, *, posting: bool = False) -> str:
    """What is said of a comment that was written, and what to do with both files unless it is posted now."""
    where, what = (clean(str(it), 4000) for it in (path, archive))
    told = f"{where}: {len(text):,} characters, for a comment on the pull request"
    if posting:
        return told
    return (
        f"{told}\n"
        f"  paste it there and drag {what} into the same comment: GitHub attaches files only by hand; "
        "or upload the archive elsewhere and give --attachment-url"
    )


def posted(url: str, edited: bool, linked: bool) -> str:
    """What is said of a comment that is on GitHub."""
    told = f"{'edited' if edited else 'posted'}: {clean(url, 400) or 'the comment'}"
    if linked:
        return told
    return (
        f"{told}\n  GitHub has no API that attaches a file to a comment: upload the archive by hand, "
        "or as an artifact of a workflow and give --attachment-url"
    )


def readme(left_out: Mapping[str, Sequence[str]], result: Result, of_run: bool = False) -> str:
    """README.txt: what the archive is, and how to check it and compare its captures again."""
    controls = "".join(f" --control FILE.zip:{name}" for name in list(left_out)[2:])
    lines = [
        "Captures of vLLM and what localizer says of them.",
        "",
        "Check it:",
        "    localize verify FILE.zip",
        "Compare again, on any machine; neither a GPU nor torch nor vLLM is needed:",
        f"    localize diff FILE.zip:candidate FILE.zip:parent{controls}",
        "Without localizer, in the unpacked folder (it passes over the XXH128 lines, which xxhsum checks):",
        "    sha256sum -c checksums.txt",
        "",
        f"Verdict: {result.verdict}. result.json holds the diff of the captures as they are here.",
        *(["run.json holds what localize run said, also of captures that are not here."] if of_run else []),
        "",
    ]
    listed = [f"  {line}" for line in left_out_lines(left_out)]
    return "\n".join([*lines, *(listed or ["Nothing was left out."]), ""])


def left_out_lines(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """What was taken away, each thing once, with the captures of which it was."""
    owners: dict[str, list[str]] = {}
    for name, what in left_out.items():
        for item in what:
            owners.setdefault(item, []).append(name)
    return [
        f"left out{'' if len(names) == len(left_out) else ' of ' + ', '.join(names)}: {clean(item)}"
        for item, names in owners.items()
    ]


def _changed(changed: Sequence[str]) -> list[str]:
    if not changed:
        return []
    return [f"  the whole captures say otherwise of: {', '.join(changed)}"]
