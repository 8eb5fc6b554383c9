"""Rates and waits, in the log."""
