"""What a probe names: a function whose calls are counted."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PROBE = re.compile(
    r"(?P<module>\w+(\.\w+)*):(?P<path>\w+(\.\w+)*)(,cache=(?P<cache>\w+(\.\w+)*))?", re.ASCII
)


@dataclass(frozen=True)
class Probe:
    """A function to count calls of.

    Attributes:
        module: its module.
        path: its name in there, such as `function` or `Class.method`.
        cache: attribute of the instance, or of the module for a function, whose `len` tells hits; or empty.
    """

    module: str
    path: str
    cache: str = ""

    @property
    def target(self) -> str:
        """`module:path`."""
        return f"{self.module}:{self.path}"

    @classmethod
    def parse(cls, text: str) -> Probe:
        """The probe that `module:Class.method[,cache=attr]` or `module:function[,cache=attr]` names.

        Raises:
            ValueError: the text has another form.
        """
        found = _PROBE.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} is not module:Class.method or module:function, perhaps with ,cache=attr"
            )
        return cls(found["module"], found["path"], found["cache"] or "")
