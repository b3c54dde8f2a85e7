"""Calls of GitHub's REST API: bounded tries and waits, and every failure one sentence without the token."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import localizer
from localizer.errors import LocalizerError
from localizer.report.safe import clean

if TYPE_CHECKING:
    import httpx

API = "https://api.github.com"
VERSION = "2022-11-28"

TRIES, REDIRECTS = 4, 3
FIRST_PAUSE = 1.0
"""Seconds before the second try; twice as many before each further one."""

MOST_WAIT = 120.0
"""Seconds that one command waits for a rate limit, all in all."""

CONNECT, SILENCE, WHOLE = 10.0, 30.0, 90.0
"""Seconds for a connection, without a byte, and for a whole answer."""

MOST_BYTES = 64 << 20
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class GitHubError(LocalizerError):
    """GitHub did not do what was asked; `status` is the answer's, 0 for none."""

    def __init__(self, sentence: str, status: int = 0) -> None:
        super().__init__(sentence)
        self.status = status


class Unclear(GitHubError):
    """What was sent may have been done or not: nobody answered, or only a machine in between."""


@dataclass(frozen=True)
class Answer:
    """What came back: the value of its JSON, and the address of the next page if there is one."""

    data: Any
    next: str | None


class GitHub:
    """One API with one token.

    Args:
        base: address of the API.
        token: goes into the header of requests to that address alone.
        sleep, now: seconds to wait, and since the epoch.

    Raises:
        LocalizerError: the address cannot be used, or httpx is not installed.
    """

    def __init__(
        self,
        base: str,
        token: str,
        *,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.base = checked(base)
        self._token, self._sleep, self._now, self._waited = token, sleep, now, 0.0
        try:
            import httpx
        except ImportError:
            raise LocalizerError(
                "--post needs httpx; install it with pip install 'localizer[post]'."
            ) from None
        for name in ("httpx", "httpcore"):  # they would log what a server says of the token
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client = httpx.Client(
            timeout=httpx.Timeout(SILENCE, connect=CONNECT),
            follow_redirects=False,
            trust_env=urlsplit(self.base).scheme == "https",  # a proxy would read plain HTTP
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def call(self, method: str, path: str, payload: Mapping[str, Any] | None = None) -> Answer:
        """Ask GitHub, again where that can help.

        Args:
            method: of HTTP. A POST is not sent again unless GitHub has surely not done it.
            path: below the API, or an address there.
            payload: what is sent as JSON.

        Raises:
            Unclear: a POST may have been done.
            GitHubError: it was refused, or could not be done in `TRIES` tries.
        """
        url, redirects, tries = self._own(_joined(f"{self.base}/", path)), 0, 0
        while True:
            try:
                status, headers, blob = self._once(method, url, payload)
            except GitHubError as error:
                tries += 1
                if tries == TRIES or isinstance(error, Unclear):
                    raise
                self.pause(tries)
                continue
            if status in (301, 302, 303, 307, 308) and headers.get("location"):
                redirects += 1
                url = self._own(_joined(url, headers["location"]), moved=True)
                if redirects > REDIRECTS or (method != "GET" and status not in (307, 308)):
                    raise GitHubError(
                        f"GitHub sends {method} from one address to another; check the name.", status
                    )
                continue
            if status < 300:
                return Answer(self._parsed(blob), headers.get("x-localizer-next"))
            tries += 1
            if (delay := self._limited(status, headers)) is not None:
                self._wait(delay, tries)
            elif status >= 500:
                sentence = f"GitHub answers with {status}{self._why(blob)}; try again later."
                if method == "POST":
                    raise Unclear(sentence, status)
                if tries == TRIES:
                    raise GitHubError(sentence, status)
                self.pause(tries)
            else:
                raise self._refused(status, blob)

    def pause(self, tries: int) -> None:
        """Wait before another try, longer each time."""
        self._sleep(FIRST_PAUSE * 2 ** (tries - 1))

    # -- one request -------------------------------------------------------------------------------------

    def _once(
        self, method: str, url: str, payload: Mapping[str, Any] | None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower case) and body of one answer."""
        import httpx

        headers = {
            "Authorization": f"Bearer {self._token}",
            "Accept": "application/vnd.github+json",
            "X-GitHub-Api-Version": VERSION,
            "User-Agent": f"localizer/{localizer.__version__}",
        }
        ends = time.monotonic() + WHOLE
        try:
            with self._client.stream(method, url, headers=headers, json=payload) as response:
                blob = b""
                for piece in response.iter_bytes():
                    blob += piece
                    if len(blob) > MOST_BYTES or time.monotonic() > ends:
                        raise self._lost(method, "the answer is too long or too slow")
                return response.status_code, self._headers(response), blob
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise GitHubError(
                f"{self._host} cannot be reached ({type(error).__name__}); check network and GITHUB_API_URL."
            ) from None
        except httpx.TimeoutException:
            raise self._lost(method, "no answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeError) as error:
            raise self._lost(method, type(error).__name__) from None

    def _lost(self, method: str, why: str) -> GitHubError:
        kind = Unclear if method == "POST" else GitHubError
        return kind(f"{self._host} did not answer as it should ({why}); try again later.")

    @staticmethod
    def _headers(response: httpx.Response) -> dict[str, str]:
        found = {name.lower(): value for name, value in response.headers.items()}
        found.pop("x-localizer-next", None)
        following = response.links.get("next", {}).get("url")
        return found | ({"x-localizer-next": following} if following else {})

    @property
    def _host(self) -> str:
        return clean(urlsplit(self.base).netloc, 200)

    def _own(self, url: str, moved: bool = False) -> str:
        """An address of the same server: no other is given the token."""
        ours = urlsplit(self.base)
        try:
            theirs = urlsplit(url)
        except ValueError:
            raise GitHubError(f"{self._host} names what is no address; check GITHUB_API_URL.") from None
        if (ours.scheme, ours.netloc) != (theirs.scheme, theirs.netloc):
            where = clean(theirs.netloc.rpartition("@")[2], 100)
            what = "sends on to" if moved else "names as its next page"
            raise GitHubError(
                f"{self._host} {what} {where}, which is not given the token; check GITHUB_API_URL."
            )
        return url

    # -- what an answer means ----------------------------------------------------------------------------

    def _parsed(self, blob: bytes) -> Any:
        try:
            return json.loads(blob)
        except (ValueError, RecursionError):
            raise GitHubError(
                f"{self._host} does not answer with JSON; check GITHUB_API_URL, and whether a proxy answers."
            ) from None

    def _why(self, blob: bytes) -> str:
        """What GitHub says of it, in brackets, without the token."""
        try:
            found = json.loads(blob)
        except (ValueError, RecursionError):
            return ""
        said = found.get("message") if isinstance(found, dict) else None
        if not isinstance(said, str):
            return ""
        return f" ({clean(said.replace(self._token, '(the token)'), 200)})"

    def _refused(self, status: int, blob: bytes) -> GitHubError:
        advice = {
            401: "the token is wrong or has expired; make a new one",
            403: "the token may not do this; give it write access to pull requests (pull-requests: write)",
            404: "there is no such pull request, or the token may not see it; check OWNER/REPO#N",
            410: "comments are not there any more; check OWNER/REPO#N",
            422: "it does not take this comment; look at it with --dry-run",
        }
        why = advice.get(status, "it cannot be done; try again later")
        return GitHubError(f"GitHub refuses with {status}{self._why(blob)}: {why}.", status)

    def _limited(self, status: int, headers: Mapping[str, str]) -> float | None:
        """Seconds to wait where a rate limit is reached; None where none is."""
        if status not in (403, 429):
            return None
        after, reset = headers.get("retry-after", ""), headers.get("x-ratelimit-reset", "")
        if after.isascii() and after.isdigit() and len(after) < 8:
            return float(after)
        if (
            headers.get("x-ratelimit-remaining") == "0"
            and reset.isascii()
            and reset.isdigit()
            and len(reset) < 12
        ):
            return max(0.0, float(reset) - self._now()) + 1
        return FIRST_PAUSE * 30 if status == 429 else None

    def _wait(self, delay: float, tries: int) -> None:
        if tries == TRIES or self._waited + delay > MOST_WAIT:
            until = datetime.fromtimestamp(min(self._now() + delay, 4e9), UTC).strftime("%H:%M UTC")
            raise GitHubError(f"GitHub's rate limit is reached; try again after {until}.", 429)
        self._waited += delay
        self._sleep(delay)


def _joined(base: str, address: str) -> str:
    """An address below another; where it is none, as it is."""
    try:
        return urljoin(base, address)
    except ValueError:
        return address


def checked(base: str) -> str:
    """The address of an API to which a token may be sent: https, or this machine.

    Raises:
        LocalizerError: it is another.
    """
    try:
        found = urlsplit(base)
        plain = found.port is None or found.port > 0
    except ValueError:
        plain, found = False, urlsplit("")
    safe = found.scheme == "https" or (found.scheme == "http" and found.hostname in LOOPBACK)
    bare = not ("@" in found.netloc or found.query or found.fragment)
    if not (plain and safe and bare and found.hostname and base.isprintable() and " " not in base):
        raise LocalizerError(f"GITHUB_API_URL must be an https address such as {API}; check it.")
    return base.rstrip("/")
