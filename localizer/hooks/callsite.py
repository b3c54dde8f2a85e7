"""Where in vLLM's source a tensor passes: file, line and function of the code that calls what is tapped."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType

import torch

PLUMBING = tuple(f"model_executor/layers/{part}/" for part in ("attention", "fused_moe", "fusion"))
"""Parts of vLLM that stand between an op and the code that calls its layer."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")
_SKIPPED = tuple(os.path.join(folder, "") for folder in (_OURS, os.path.dirname(torch.__file__)))


def call_site() -> str:
    """The nearest code of vLLM that leads here: file, line and function, as `vllm/...:232 LlamaMLP.forward`.

    Empty where the way leads through compiled code, whose source nobody wrote.
    """
    package = getattr(sys.modules.get("vllm"), "__file__", None)
    if not package:
        return ""
    home = os.path.join(os.path.dirname(package), "")
    packages = os.path.dirname(os.path.dirname(home))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(home):
            if not path.startswith(PLUMBING, len(home)):
                function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # Python 3.11
                return f"{os.path.relpath(path, packages)}:{frame.f_lineno} {function}"
        elif not path.startswith(_SKIPPED) and (not path.startswith(_STDLIB) or "site-packages" in path):
            return ""
        frame = frame.f_back
    return ""
