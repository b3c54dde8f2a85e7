"""The one comment of localizer on a pull request: found among all, edited, or posted where there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from localizer.errors import LocalizerError
from localizer.github import token
from localizer.github.api import API, TRIES, GitHub, GitHubError, Unclear, checked
from localizer.report.history import MARKER

TARGET = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,38})/([A-Za-z0-9._-]{1,100})#([1-9]\d{0,8})", re.ASCII)

ACTIONS = "github-actions[bot]"
"""Who a workflow's own token is; it may not ask."""

MOST_PAGES = 200


@dataclass(frozen=True)
class Target:
    """A pull request."""

    owner: str
    repository: str
    number: int

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `OWNER/REPO#N`.

        Raises:
            LocalizerError: it is not that.
        """
        found = TARGET.fullmatch(text)
        if found is None or found[2] in (".", ".."):
            raise LocalizerError(
                f"{text[:200]!r} is no pull request; write OWNER/REPO#N, such as vllm-project/vllm#1."
            )
        return cls(found[1], found[2], int(found[3]))

    @property
    def issues(self) -> str:
        """Where its repository's comments are."""
        return f"repos/{self.owner}/{self.repository}/issues"

    @property
    def comments(self) -> str:
        """Where its own comments are."""
        return f"{self.issues}/{self.number}/comments"


@dataclass(frozen=True)
class Posted:
    """What was done: the comment's address, as GitHub says it, and whether one that was there was edited."""

    url: str
    edited: bool


@dataclass(frozen=True)
class _Comment:
    number: int
    body: str
    url: str


def connect(environment: Mapping[str, str]) -> GitHub:
    """GitHub as the variables of the environment name it.

    Raises:
        LocalizerError: there is no token, the address cannot be used, or httpx is not installed.
    """
    base = checked(environment.get("GITHUB_API_URL") or API)
    return GitHub(base, token.find(environment, base))


def post(github: GitHub, target: Target, make: Callable[[str | None], str]) -> Posted:
    """Edit the comment, or post it.

    Args:
        github: where.
        target: on which pull request.
        make: gives the text, from that of the comment that is there; None for none.

    Raises:
        GitHubError: it could not be done, or whether it was is not known.
    """
    mine = _whoever(github)
    found = _find(github, target, mine)
    text = make(None if found is None else found.body)
    return _create(github, target, mine, text, make) if found is None else _edit(github, target, found, text)


def _edit(github: GitHub, target: Target, found: _Comment, text: str) -> Posted:
    answer = github.call("PATCH", f"{target.issues}/comments/{found.number}", {"body": text})
    return Posted(_url(answer.data) or found.url, edited=True)


def _create(
    github: GitHub,
    target: Target,
    mine: Callable[[Any], bool],
    text: str,
    make: Callable[[str | None], str],
) -> Posted:
    """Post a comment once, also where an answer is lost: it is looked for before it is sent again."""
    for tries in range(1, TRIES + 1):
        try:
            return Posted(_url(github.call("POST", target.comments, {"body": text}).data), edited=False)
        except Unclear as unclear:
            github.pause(tries)
            try:
                found = _find(github, target, mine)
            except GitHubError:
                raise GitHubError(
                    "Whether the comment was posted is not known, since GitHub stopped answering; "
                    "look at the pull request before you try again."
                ) from None
            if found is not None and _same(found.body, text):
                return Posted(found.url, edited=False)
            if found is not None:  # another job's, meanwhile
                return _edit(github, target, found, make(found.body))
            if tries == TRIES:
                raise GitHubError(f"The comment was not posted: {unclear}") from None
    raise AssertionError("the last try returns or raises")


def _same(one: str, other: str) -> bool:
    return one.replace("\r\n", "\n").strip() == other.strip()


def _whoever(github: GitHub) -> Callable[[Any], bool]:
    """Tells whether a user is the token's own; a workflow's token, which may not ask, is that of Actions."""
    try:
        me = github.call("GET", "user").data
    except GitHubError as error:
        if error.status not in (403, 404):
            raise
        return lambda user: isinstance(user, dict) and user.get("login") == ACTIONS
    number = me.get("id") if isinstance(me, dict) else None
    if not isinstance(number, int):
        raise GitHubError("GitHub does not say whose the token is; try another token.")
    return lambda user: isinstance(user, dict) and user.get("id") == number


def _find(github: GitHub, target: Target, mine: Callable[[Any], bool]) -> _Comment | None:
    """The first own comment that begins with the marker: who only quotes it does not begin with it."""
    for item in _all(github, target):
        body, number = item.get("body"), item.get("id")
        if (
            isinstance(body, str)
            and isinstance(number, int)
            and body.startswith(MARKER)
            and mine(item.get("user"))
        ):
            return _Comment(number, body, _url(item))
    return None


def _all(github: GitHub, target: Target) -> Iterator[dict[str, Any]]:
    page: str | None = f"{target.comments}?per_page=100"
    seen = set[str]()
    for _ in range(MOST_PAGES):
        if page is None:
            return
        if page in seen:
            break
        seen.add(page)
        answer = github.call("GET", page)
        if not isinstance(answer.data, list):
            raise GitHubError("GitHub does not list the comments as it should; check GITHUB_API_URL.")
        yield from (item for item in answer.data if isinstance(item, dict))
        page = answer.next
    raise GitHubError(
        f"The pull request's comments do not end after {len(seen)} pages; post the comment by hand."
    )


def _url(data: Any) -> str:
    found = data.get("html_url") if isinstance(data, dict) else None
    return found if isinstance(found, str) else ""
