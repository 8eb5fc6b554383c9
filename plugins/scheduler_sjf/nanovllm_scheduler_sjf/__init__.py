"""Shortest job first, with ageing."""
