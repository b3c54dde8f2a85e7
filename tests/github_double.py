"""A test double of GitHub's API for comments: a server of this machine, and nothing of GitHub's own code.

It keeps comments, pages them, knows tokens, and misbehaves on request. That GitHub itself answers likewise is
taken from its documentation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "canary-4b1d-do-not-print-me"
ME, BOT = {"login": "me", "id": 7}, {"login": "github-actions[bot]", "id": 41898282, "type": "Bot"}


@dataclass
class Answer:
    """What is answered in place of what GitHub would; `does`: the request is carried out all the same."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    does: bool = False
    hangs: float = 0.0
    drops: bool = False


@dataclass
class Double:
    """The server's memory: comments in order, every request, and what goes wrong next."""

    comments: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    wrong: dict[str, list[Answer]] = field(default_factory=dict)
    user: dict[str, Any] | None = field(default_factory=lambda: dict(ME))
    author: dict[str, Any] = field(default_factory=lambda: dict(ME))
    page: int = 2
    base: str = ""
    elsewhere: str = ""

    def add(self, body: str, user: dict[str, Any]) -> dict[str, Any]:
        number = len(self.comments) + 1
        comment = {"id": number, "body": body, "user": user, "html_url": f"https://github.test/c/{number}"}
        self.comments.append(comment)
        return comment

    def did(self, method: str) -> int:
        return sum(found == method for found, _, _ in self.requests)


class _Handler(BaseHTTPRequestHandler):
    double: Double
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def _go(self) -> None:
        double, length = self.double, int(self.headers.get("content-length") or 0)
        sent = self.rfile.read(length)
        token = self.headers.get("authorization", "")
        double.requests.append((self.command, self.path, token))
        queue = double.wrong.get(self.command) or double.wrong.get(self.path) or []
        answer = queue.pop(0) if queue else None
        if answer is not None and not answer.does:
            return self._say(answer)
        if token != f"Bearer {TOKEN}":
            return self._say(Answer(401, b'{"message": "Bad credentials"}'))
        made = self._carry_out(json.loads(sent) if sent else None)
        return self._say(answer if answer is not None else made)

    do_GET = do_POST = do_PATCH = _go  # noqa: N815

    def _carry_out(self, sent: Any) -> Answer:
        double = self.double
        path, _, query = self.path.partition("?")
        if path == "/user":
            told = b'{"message": "Resource not accessible by integration"}'
            return Answer(403, told) if double.user is None else self._json(double.user)
        if path == "/repos/o/r/issues/5/comments" and self.command == "POST":
            if len(sent["body"]) > 65_536:
                return Answer(422, b'{"message": "Validation Failed"}')
            return self._json(double.add(sent["body"], double.author), 201)
        if path == "/repos/o/r/issues/5/comments":
            number = int(query.rpartition("&page=")[2]) if "&page=" in query else 1
            here = double.comments[(number - 1) * double.page : number * double.page]
            found = self._json(here)
            if number * double.page < len(double.comments):
                following = f"{double.elsewhere or double.base}{path}?per_page=100&page={number + 1}"
                found.headers["Link"] = f'<{following}>; rel="next", <{double.base}/x>; rel="last"'
            return found
        if path.startswith("/repos/o/r/issues/comments/") and self.command == "PATCH":
            comment = double.comments[int(path.rpartition("/")[2]) - 1]
            comment["body"] = sent["body"]
            return self._json(comment)
        return Answer(404, b'{"message": "Not Found"}')

    def _json(self, value: Any, status: int = 200) -> Answer:
        return Answer(status, json.dumps(value).encode())

    def _say(self, answer: Answer) -> None:
        if answer.hangs:
            time.sleep(answer.hangs)
        if answer.drops:
            self.close_connection = True
            self.connection.close()
            return
        try:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)
        except OSError:
            pass  # whoever asked does not wait any longer


@contextmanager
def serving(double: Double) -> Iterator[str]:
    """Serve `double`; gives its address."""
    handler = type("Handler", (_Handler,), {"double": double})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    double.base = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield double.base
    finally:
        server.shutdown()
        server.server_close()


Making = Callable[[str | None], str]
