"""Paged attention in plain torch, one sequence at a time."""
