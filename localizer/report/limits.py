"""What limits the answer of an intervention, in a sentence each."""

from __future__ import annotations

from localizer.diff import intervention as codes
from localizer.diff.intervention import Limit
from localizer.report.counts import count
from localizer.report.safe import clean

PLACES_SHOWN = 5


def sentence(limit: Limit) -> str:
    """A reason without a full stop."""
    return _SENTENCES[limit.code](limit)


def _never_ran(limit: Limit) -> str:
    return f"intervention never ran: {_WHY[limit.detail](limit)}{_where(limit)}"


def _elsewhere(limit: Limit) -> str:
    names = [clean(name) for name in limit.places[:PLACES_SHOWN]]
    if len(limit.places) > PLACES_SHOWN:
        names.append(f"{len(limit.places) - PLACES_SHOWN:,} more")
    return (
        f"{clean(limit.target)} is bound elsewhere too ({', '.join(names)}), where the original went on; "
        "name these places with --patch, or replace them all with --patch-everywhere"
    )


def _where(limit: Limit) -> str:
    return f" (worker {limit.worker})" if limit.worker else ""


_WHY = {
    codes.NOT_CALLED: lambda it: f"{clean(it.target)} was not called in phase B",
    codes.COMPILED: lambda it: (
        f"{clean(it.target)} was not called in phase B, and the engine runs compiled: code that was traced "
        "does not reach it; add --engine enforce_eager=true"
    ),
    codes.OUTSIDE: lambda it: (
        f"{clean(it.target)} was called {count(it.count, 'time')} in phase B, but within none of its "
        "recorded steps"
    ),
    codes.ELSEWHERE: _elsewhere,
    codes.NOT_EMPTY: lambda it: (
        f"the first requests of phase {clean(it.target)} took tokens from the prefix cache, "
        "which was to be empty"
    ),
    codes.NOT_WARM: lambda it: (
        f"no request of the first round of phase {clean(it.target)} took tokens from the prefix cache; give "
        "prompts longer than a KV block (--prompt-tokens), and leave prefix caching on"
    ),
}

_SENTENCES = {
    codes.NEVER_RAN: _never_ran,
    codes.NOT_RESTORED: lambda it: (
        f"{clean(it.target)} was not put back before phase A2{_where(it)}: "
        "something else replaced it meanwhile"
    ),
    codes.NOT_RESET: lambda it: (
        f"the prefix cache was not reset before phase {clean(it.target)}: vLLM refused it "
        f"{count(it.count, 'time')}, as it does while blocks are in use"
    ),
    codes.NOT_KNOWN: lambda it: (
        "how the phases went is not known: the run did not end by itself, or a worker did not say"
    ),
    codes.NOT_BACK: lambda it: (
        "A2 differs from A1: the process does not come back to what it did before the change, "
        "or it does not repeat itself"
    ),
}
