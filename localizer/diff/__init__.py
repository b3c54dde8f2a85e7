"""Align -> compare -> localize -> verdict: what two captures say about each other, as plain data."""

from localizer.diff.pipeline import diff, diff_within

__all__ = ["diff", "diff_within"]
