"""A result as JSON: the result object, its reasons with their sentences, and the scope (docs/result.md)."""

from __future__ import annotations

import json
from typing import Any, TextIO

import msgspec

from localizer.diff.result import Result
from localizer.report import controls, wording
from localizer.report.scope import scope


def render(result: Result, stream: TextIO) -> None:
    """Write the result."""
    write(tree(result), stream)


def write(plain: dict[str, Any], stream: TextIO) -> None:
    """Write plain objects; ASCII only, so that nothing in them can steer a terminal."""
    json.dump(plain, stream, indent=1, ensure_ascii=True, allow_nan=False)
    stream.write("\n")


def tree(result: Result) -> dict[str, Any]:
    """The result as plain objects; numbers that JSON cannot hold become null."""
    reasons = [
        {"code": item.code, "source": item.source, "text": wording.reason(item)} for item in result.reasons
    ]
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(result))
    if result.controls is not None:
        for item, control in zip(plain["controls"]["captures"], result.controls.captures, strict=True):
            for reason, unfit in zip(item["unfit"], control.unfit, strict=True):
                reason["text"] = controls.unfit(unfit)
    return {**plain, "reasons": reasons, "scope": msgspec.to_builtins(scope(result))}
