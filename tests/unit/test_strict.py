"""JSON on which readers may disagree is refused in one sentence that prints."""

from __future__ import annotations

import json
import re

import pytest

from localizer.store import strict


@pytest.mark.parametrize(
    "value", [None, True, [], {}, "\u00e9", [1, {"a": [1.5, "x"]}], {"a": {"a": 1}}, 10**30]
)
def test_json_is_read(value: object) -> None:
    assert strict.loads(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("blob", "says"),
    [
        (b"", "it is not valid JSON: Expecting value at character 0"),
        (b"{'a': 1}", "it is not valid JSON"),
        (b"[1] [2]", "it is not valid JSON: Extra data"),
        (b'["\xff"]', "it is not UTF-8"),
        ("[1]".encode("utf-16"), "it is not UTF-8"),
        (b"\xef\xbb\xbf[1]", "it is not valid JSON"),
        (b'[{"a": 1, "b": 2, "a": 1}]', "it holds the key 'a' twice"),
        (b'{"a\\u001b[2J\\n": 1, "a\\u001b[2J\\n": 1}', r"it holds the key 'a\x1b[2J\n' twice"),
        (b"[NaN]", "it holds NaN, which JSON has not"),
        (b'{"a": -Infinity}', "it holds -Infinity, which JSON has not"),
        (b"[" * 200_000, "it is nested too deeply"),
        (b'{"a":' * 200_000, "it is nested too deeply"),
        (b"9" * 5000, "it holds a number of too many digits"),
        (b"[1.5, -" + b"9" * 5000 + b"]", "it holds a number of too many digits"),
    ],
)
def test_what_is_not_json_of_this_kind_is_refused(blob: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        strict.loads(blob)
    assert str(caught.value).isprintable()


def test_a_long_key_is_not_repeated_whole() -> None:
    key = b'"%s": 1' % (b"k" * 100_000)
    with pytest.raises(ValueError, match="twice") as caught:
        strict.loads(b"{%s, %s}" % (key, key))
    assert len(str(caught.value)) < 200
