"""What `localize models` prints."""

from __future__ import annotations

from collections.abc import Iterable

from localizer.report.safe import clean
from localizer.workload.models import BuiltIn


def listing(models: Iterable[BuiltIn]) -> str:
    """Two lines a model: name, what it is, size, licence; whether it is built and where."""
    lines, shown = [], list(models)
    width = max((len(model.name) for model in shown), default=0)
    for model in shown:
        lines.append(f"{model.name:<{width}} {model.what}; {model.size / 1e6:.0f} MB, {model.licence}")
        lines.append(
            f"{'':<{width}} {'built' if model.is_built else 'not built'}: {clean(str(model.folder), 4000)}"
        )
    return "\n".join(lines)
