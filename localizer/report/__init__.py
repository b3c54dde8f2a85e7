"""Presenters: all wording is here; findings come as data."""
