"""JSON as a capture may hold it: UTF-8, no key twice, no endless numbers, nothing nested without end."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def loads(blob: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON of this kind; the message says why in one sentence of printable characters.
    """
    try:
        return json.loads(blob.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except _Refused as error:
        raise ValueError(str(error)) from None
    except ValueError:  # Python's limit on the digits of an integer
        raise ValueError("it holds a number of too many digits") from None


class _Refused(ValueError):
    """What JSON readers do not agree on."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _Refused(f"it holds the key {max(keys, key=Counter(keys).__getitem__)[:80]!r} twice")
    return table


def _refuse(name: str) -> Any:
    raise _Refused(f"it holds {name}, which JSON has not")
