"""What is said of probes: whether the code that was named really ran."""

from __future__ import annotations

from localizer.report.counts import count
from localizer.report.safe import clean
from localizer.store.schema import Probe


def probed(probe: Probe) -> str:
    """In a sentence, without a full stop, how often a probe's function was called."""
    outside = (
        f" ({count(probe.calls_outside_steps, 'call')} outside of steps)" if probe.calls_outside_steps else ""
    )
    if not probe.calls:
        return f"{clean(probe.target)} was never called in a recorded step{outside}: it did not run there"
    hits = ""
    if probe.cache:
        known = "hits not known" if probe.hits is None else count(probe.hits, "hit")
        hits = f", {known} of {clean(probe.cache)}"
    return f"{clean(probe.target)}: {count(probe.calls, 'call')} in recorded steps{hits}{outside}"
