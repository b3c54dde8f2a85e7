"""What is said of tolerances: they mark, and never hide."""

from __future__ import annotations

from collections.abc import Iterator

from localizer.diff.result import Criterion, Result, SiteResult
from localizer.diff.tolerance import ULP, criteria_of
from localizer.report.safe import clean

WITHIN = {True: "within", False: "beyond", None: "not known"}


def mark(result: Result, site: str, within: bool | None) -> str:
    """`within the tolerance given (ulp:1)` or `beyond` it; empty where none was given or nothing judged."""
    criteria = criteria_of(site, result.tolerances)
    if within is None or not criteria:
        return ""
    given = " or ".join(dict.fromkeys(map(criterion, criteria)))
    return f"{WITHIN[within]} the tolerance given ({given})"


def criterion(one: Criterion) -> str:
    """`ulp:1`, as it is typed."""
    return f"{one.kind}:{int(one.limit) if one.kind == ULP else f'{one.limit:g}'}"


def of_site(site: SiteResult) -> str:
    """How many of the rows read are within tolerance; empty where none was given."""
    if site.rows_within_tolerance is None or not site.rows_read:
        return ""
    if site.within_tolerance:
        return "within tolerance"
    return f"{site.rows_within_tolerance:,} of {site.rows_read:,} within tolerance"


def establishes(result: Result) -> Iterator[str]:
    """That tolerances were given, and what that does not change."""
    for given in result.tolerances:
        limits = "|".join(map(criterion, given.criteria))
        unused = (
            ""
            if any(criteria_of(site.name, [given]) for site in result.sites)
            else (", which matches no site of both captures")
        )
        yield (
            f"Tolerance {clean(given.site)}={limits} was given{unused}: it marks what differs by no more "
            "and changes neither what was compared nor the verdict."
        )


def does_not_establish(result: Result) -> Iterator[str]:
    """What it is not to be taken for."""
    if result.tolerances:
        yield "That a difference within the tolerance given is harmless, or noise."
