"""Lies beside a script, which imports it."""

WORD = "found"
