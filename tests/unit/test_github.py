"""Posting against a double of GitHub (github_double.py): one comment, bounded tries, a token nobody sees."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import Plan, attention, bump, pair
from github_double import BOT, ME, TOKEN, Answer, Double, serving

from localizer.errors import LocalizerError
from localizer.github import api, sticky, token
from localizer.github.api import GitHub, GitHubError
from localizer.github.sticky import Posted, Target
from localizer.report.history import MARKER

TARGET = Target("o", "r", 5)
OTHER = {"login": "someone", "id": 99}


@pytest.fixture
def double() -> Iterator[Double]:
    made = Double()
    with serving(made):
        yield made


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def github(double: Double, waits: list[float]) -> Iterator[GitHub]:
    made = GitHub(double.base, TOKEN, sleep=waits.append, now=lambda: 1_000_000.0)
    yield made
    made.close()


def make(before: str | None) -> str:
    return f"{MARKER}\n\nnew, after {before!r}\n"


def posted(github: GitHub) -> Posted:
    return sticky.post(github, TARGET, make)


def test_it_posts_once_and_then_edits(github: GitHub, double: Double) -> None:
    assert posted(github) == Posted("https://github.test/c/1", edited=False)
    assert posted(github) == Posted("https://github.test/c/1", edited=True)
    (comment,) = double.comments
    assert comment["body"] == make(make(None))
    assert (double.did("POST"), double.did("PATCH")) == (1, 1)
    assert {found for _, _, found in double.requests} == {f"Bearer {TOKEN}"}


def test_it_finds_its_comment_behind_pages_of_others(github: GitHub, double: Double) -> None:
    for number in range(7):
        double.add(f"comment {number}", dict(OTHER))
    double.add(f"{MARKER}\nmine", dict(ME))
    assert posted(github).edited
    assert double.did("POST") == 0
    assert [it["id"] for it in double.comments if it["body"].startswith(f"{MARKER}\n\nnew")] == [8]


def test_it_does_not_edit_what_others_wrote_or_what_quotes_the_marker(github: GitHub, double: Double) -> None:
    double.add(f"{MARKER}\nnot mine", dict(OTHER))
    double.add(f"> {MARKER}\nmine, but a quotation", dict(ME))
    double.add(f"{MARKER}\nnot mine", {"login": "me", "id": 8})
    assert not posted(github).edited
    assert [it["body"].splitlines()[0] for it in double.comments] == [MARKER, f"> {MARKER}", MARKER, MARKER]
    assert double.did("PATCH") == 0


def test_the_token_of_a_workflow_may_not_ask_who_it_is(github: GitHub, double: Double) -> None:
    double.user, double.author = None, dict(BOT)
    double.add(f"{MARKER}\nnot mine", dict(OTHER))
    assert not posted(github).edited
    assert posted(github).edited
    assert len(double.comments) == 2


# -- failures ---------------------------------------------------------------------------------------------

LIMITED = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1000030"}


@pytest.mark.parametrize(
    ("answers", "waited"),
    [
        ([Answer(403, headers={"retry-after": "7"})], [7.0]),
        ([Answer(403, headers=LIMITED)], [31.0]),
        ([Answer(429)], [30.0]),
        ([Answer(502), Answer(500)], [1.0, 2.0]),
        ([Answer(drops=True)], [1.0]),
    ],
    ids=["retry-after", "reset", "429", "5xx", "dropped"],
)
def test_it_tries_again_where_that_helps(
    github: GitHub, double: Double, waits: list[float], answers: list[Answer], waited: list[float]
) -> None:
    double.wrong["GET"] = answers
    assert not posted(github).edited
    assert waits == waited
    assert len(double.comments) == 1


@pytest.mark.parametrize(
    ("method", "answers", "says"),
    [
        ("GET", [Answer(401, b'{"message": "Bad credentials"}')], "refuses with 401 .* make a new one"),
        ("POST", [Answer(403, b'{"message": "Resource not accessible"}')], "403 .*pull-requests: write"),
        ("POST", [Answer(404, b"{}")], "404: there is no such pull request"),
        ("POST", [Answer(422, b'{"message": "Validation Failed"}')], "422 .Validation Failed.*--dry-run"),
        ("POST", [Answer(418, b"[]")], "refuses with 418: it cannot be done"),
        ("GET", [Answer(503)] * 4, "answers with 503; try again later"),
        ("GET", [Answer(403, headers={"retry-after": "3600"})], "rate limit is reached; try again after"),
        ("GET", [Answer(403, headers={"retry-after": "50"})] * 4, "rate limit is reached"),
        ("GET", [Answer(200, b"<html>hello")], "does not answer with JSON"),
        ("GET", [Answer(200, b"[" * 100_000)], "does not answer with JSON"),
        ("GET", [Answer(200, b'{"no": "id"}')], "does not say whose the token is"),
        ("GET", [Answer(drops=True)] * 4, "did not answer as it should"),
        ("GET", [Answer(302, headers={"location": "https://evil.example/user"})], "sends on to evil.example"),
        ("GET", [Answer(302, headers={"location": "//evil.example/user"})], "not given the token"),
        ("POST", [Answer(302, headers={"location": "/elsewhere"})], "from one address to another"),
        ("GET", [Answer(302, headers={"location": "/user"})] * 9, "from one address to another"),
        ("GET", [Answer(200, b'{"id": 7}'), Answer(200, b"{}")], "does not list the comments"),
        ("GET", [Answer(200, b'{"id": 7}'), Answer(200, b"[]", {"link": '<http://[::1>; rel="next"'})],
         "names what is no address"),
    ],
)  # fmt: skip
def test_every_failure_is_one_sentence(
    github: GitHub, double: Double, waits: list[float], method: str, answers: list[Answer], says: str
) -> None:
    double.wrong[method] = list(answers)
    with pytest.raises(GitHubError, match=says) as failed:
        posted(github)
    assert failed.value.exit_code == 2
    assert str(failed.value).endswith(".")
    assert "\n" not in str(failed.value)
    assert sum(waits) <= api.MOST_WAIT
    assert double.comments == []


def test_the_token_goes_to_no_other_server(github: GitHub, double: Double) -> None:
    other = Double()
    with serving(other) as address:
        double.wrong["GET"] = [Answer(307, headers={"location": f"{address}/user"})]
        with pytest.raises(GitHubError, match="which is not given the token"):
            posted(github)
        double.elsewhere = address
        for number in range(3):
            double.add(f"{number}", dict(OTHER))
        with pytest.raises(GitHubError, match="names as its next page"):
            posted(github)
    assert other.requests == []


def test_pages_that_go_round_in_a_circle(github: GitHub, double: Double) -> None:
    first = f"/{TARGET.comments}?per_page=100"
    double.wrong[first] = [Answer(200, b"[]", {"link": f'<{double.base}{first}>; rel="next"'})] * 9
    with pytest.raises(GitHubError, match="do not end after 2 pages"):
        posted(github)
    assert (len(double.requests), double.comments) == (3, [])


def test_no_proxy_reads_what_is_for_this_machine(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Double()
    with serving(other) as address:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, address)
        made = GitHub(double.base, TOKEN)
        assert not posted(made).edited
        made.close()
    assert other.requests == []


def test_a_renamed_repository_is_followed_on_the_same_server(github: GitHub, double: Double) -> None:
    double.wrong["/repos/o/old/issues/5/comments?per_page=100"] = [
        Answer(301, headers={"location": "/repos/o/r/issues/5/comments?per_page=100"})
    ]
    double.add(f"{MARKER}\nmine", dict(ME))
    old = Target("o", "old", 5)
    double.wrong["PATCH"] = [Answer(307, headers={"location": "/repos/o/r/issues/comments/1"})]
    assert sticky.post(github, old, make).edited


def test_slow_answers(github: GitHub, double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "SILENCE", 0.2)
    fast = GitHub(double.base, TOKEN, sleep=lambda _: None)
    double.wrong["GET"] = [Answer(hangs=0.8)]
    started = time.monotonic()
    assert not posted(fast).edited
    assert time.monotonic() - started < 10
    fast.close()


@pytest.mark.parametrize(
    "lost",
    [
        Answer(drops=True, does=True),
        Answer(502, does=True),
        Answer(200, b"", {"content-length": "9"}, does=True),
    ],
    ids=["dropped", "5xx", "torn"],
)
def test_a_post_whose_answer_is_lost_makes_no_second_comment(
    github: GitHub, double: Double, lost: Answer
) -> None:
    double.wrong["POST"] = [lost]
    assert posted(github) == Posted("https://github.test/c/1", edited=False)
    assert len(double.comments) == 1
    assert double.did("POST") == 1


def test_a_post_that_timed_out_after_it_was_done(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "SILENCE", 0.2)
    github = GitHub(double.base, TOKEN, sleep=lambda _: None)
    double.wrong["POST"] = [Answer(hangs=0.8, does=True)]
    assert posted(github) == Posted("https://github.test/c/1", edited=False)
    assert len(double.comments) == 1
    github.close()


def test_a_post_that_was_not_done_is_tried_again(github: GitHub, double: Double) -> None:
    double.wrong["POST"] = [Answer(502), Answer(drops=True)]
    assert not posted(github).edited
    assert len(double.comments) == 1
    assert double.did("POST") == 3


def test_a_post_that_never_goes_through(github: GitHub, double: Double) -> None:
    double.wrong["POST"] = [Answer(502)] * 9
    with pytest.raises(GitHubError, match="The comment was not posted: GitHub answers with 502"):
        posted(github)
    assert double.did("POST") == api.TRIES


def test_a_post_of_which_nothing_can_be_known(github: GitHub, double: Double) -> None:
    double.wrong["POST"] = [Answer(502)]
    double.wrong["GET"] = []

    class Dies(list[Answer]):
        """GitHub stops answering after the first POST."""

        def __bool__(self) -> bool:
            return double.did("POST") > 0

        def pop(self, _: int = 0) -> Answer:  # type: ignore[override]
            return Answer(500)

    double.wrong["GET"] = Dies()
    with pytest.raises(GitHubError, match="Whether the comment was posted is not known"):
        posted(github)
    assert double.did("POST") == 1


# -- the token --------------------------------------------------------------------------------------------

LEAKY = [
    [Answer(401, f'{{"message": "bad token {TOKEN}"}}'.encode())],
    [Answer(400, f'{{"message": "{TOKEN * 20}"}}'.encode())],
    [Answer(422, TOKEN.encode())],
    [Answer(500, f'{{"message": "{TOKEN}"}}'.encode())] * 4,
    [Answer(200, f"<p>{TOKEN}".encode())],
    [Answer(302, headers={"location": f"https://{TOKEN}@evil.example/"})],
    [Answer(drops=True)] * 4,
    [Answer(200, b"{}", {"content-encoding": "gzip"})] * 4,
]


@pytest.mark.parametrize("answers", LEAKY)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_token_is_in_no_message_exception_or_log(
    github: GitHub, double: Double, answers: list[Answer], method: str
) -> None:
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.DEBUG)
    try:
        double.wrong[method] = list(answers)
        with pytest.raises(GitHubError) as failed:
            posted(github)
    finally:
        logging.getLogger().removeHandler(handler)
        logging.getLogger().setLevel(level)
    told = "".join(traceback.format_exception(failed.value))
    assert TOKEN not in told + repr(failed.value) + log.getvalue()


def test_where_the_token_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert token.find({"GITHUB_TOKEN": "one", "GH_TOKEN": "two"}, api.API) == "one"
    assert token.find({"GITHUB_TOKEN": "", "GH_TOKEN": "two\n"}, api.API) == "two"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LocalizerError, match="There is no token for GitHub; set GITHUB_TOKEN or GH_TOKEN"):
        token.find({}, api.API)
    gh = tmp_path / "gh"  # a double of GitHub's command line
    gh.write_text('#!/bin/sh\n[ "$1 $2 $3 $4" = "auth token --hostname github.com" ] && echo three\n')
    gh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert token.find({}, api.API) == "three"
    for wrong in ("a b", "a\nb", "é", "\x00"):
        with pytest.raises(LocalizerError, match="is no token") as failed:
            token.find({"GITHUB_TOKEN": wrong}, api.API)
        assert wrong not in str(failed.value)


@pytest.mark.parametrize(
    "address",
    [
        "http://github.example",
        "ftp://x",
        "https://",
        "x",
        "https://u:p@x",
        "https://x?y",
        "http://[",
        "",
        "https://:p@x",
        "https://@x",
        "https://x y",
        "https://x\ny",
    ],
)
def test_addresses_to_which_no_token_is_sent(address: str) -> None:
    with pytest.raises(LocalizerError, match="must be an https address"):
        api.checked(address)
    assert api.checked("https://github.example/api/v3/") == "https://github.example/api/v3"


@pytest.mark.parametrize(
    "text", ["", "a/b", "a#1", "a/b#0", "a/b#x", "../b#1", "a/..#1", "a/b#1\n", "a b/c#1", "a/b/c#1"]
)
def test_what_is_no_pull_request(text: str) -> None:
    with pytest.raises(LocalizerError, match="write OWNER/REPO#N"):
        Target.parse(text)
    assert Target.parse("a_b/c.d#12") == Target("a_b", "c.d", 12)  # of an enterprise's users


# -- the command ------------------------------------------------------------------------------------------


def attach(folder: Path, base: str, *arguments: str, secret: str = TOKEN) -> tuple[int, str]:
    """Exit code and all output of `localize attach`, run as a process of its own."""
    environment = os.environ | {"GITHUB_TOKEN": secret, "GITHUB_API_URL": base, "LOCALIZER_DEBUG": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "localizer", "attach", *arguments],
        cwd=folder, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_the_command_posts_and_edits(tmp_path: Path, double: Double) -> None:
    changed = {("r01.00", 4, attention(1, "output")): bump()}
    pair(tmp_path / "captures", Plan(), changes=changed)
    code, said = attach(tmp_path, double.base, "candidate", "parent", "--post", "o/r#5")
    assert (code, "posted: https://github.test/c/1" in said) == (0, True), said
    assert "GitHub has no API that attaches a file" in said
    pair(tmp_path / "captures", Plan(number=2))
    url = "https://artifacts.example/1"
    code, said = attach(
        tmp_path, double.base, "candidate", "parent", "--post", "o/r#5", "--attachment-url", url
    )
    assert (code, "edited: https://github.test/c/1" in said) == (0, True), said
    (comment,) = double.comments
    assert comment["body"].splitlines()[2] == "## localizer: identical"
    assert "Earlier verdicts: 1" in comment["body"]
    assert f"[download](<{url}>)" in comment["body"]
    assert double.did("POST") == 1
    assert TOKEN not in said
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]
    code, said = attach(tmp_path, double.base, "candidate-parent.zip", "--post", "o/r#5", secret="wrong")
    assert (code, said.splitlines()[-1].startswith("localize: GitHub refuses with 401")) == (2, True)
    assert "wrong" not in said.replace("the token is wrong", "")


def test_a_dry_run_needs_no_token_and_posts_nothing(tmp_path: Path, double: Double) -> None:
    pair(tmp_path / "captures", Plan())
    arguments = ("candidate", "parent", "--post", "o/r#5", "--dry-run")
    code, said = attach(tmp_path, double.base, *arguments, secret="")
    assert code == 0
    assert MARKER in said.splitlines()
    assert (double.requests, list(tmp_path.glob("*.md"))) == ([], [])
