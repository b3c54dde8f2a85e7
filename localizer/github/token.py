"""The token with which a comment is posted; it goes into one header, and nowhere else."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from urllib.parse import urlsplit

from localizer.errors import LocalizerError

VARIABLES = ("GITHUB_TOKEN", "GH_TOKEN")
TOKEN = re.compile(r"[\x21-\x7e]{1,2000}", re.ASCII)
GH_SECONDS = 20


def find(environment: Mapping[str, str], api: str) -> str:
    """The token of the environment, else that of `gh auth token`.

    Args:
        environment: variables by name.
        api: address of the API for which it is.

    Raises:
        LocalizerError: there is none, or it cannot be one; the message does not hold it.
    """
    for name in VARIABLES:
        if environment.get(name):
            return _checked(environment[name], name)
    given = _of_gh((urlsplit(api).hostname or "").removeprefix("api."))
    if given:
        return _checked(given, "gh auth token")
    raise LocalizerError(
        f"There is no token for GitHub; set {' or '.join(VARIABLES)}, or log in with gh auth login."
    )


def _checked(token: str, where: str) -> str:
    token = token.strip()
    if not TOKEN.fullmatch(token):
        raise LocalizerError(
            f"What {where} gives is no token: it is empty or holds spaces or other characters."
        )
    return token


def _of_gh(host: str) -> str:
    """What GitHub's own command line is logged in with; empty where it is not there or not logged in."""
    program = shutil.which("gh")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "auth", "token", "--hostname", host],
            capture_output=True,
            text=True,
            check=False,
            timeout=GH_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return done.stdout if done.returncode == 0 else ""
