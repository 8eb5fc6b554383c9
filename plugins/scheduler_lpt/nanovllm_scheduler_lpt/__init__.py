"""Longest processing time first."""
