"""Align -> compare -> localize -> verdict: what two captures say about each other, as plain data."""
