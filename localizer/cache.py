"""The folder for things that can be made again: built models, overlay trees."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`LOCALIZER_CACHE`, or `localizer` in the XDG cache folder."""
    chosen = os.environ.get("LOCALIZER_CACHE")
    if chosen:
        return Path(os.path.expanduser(chosen)).resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "localizer"
