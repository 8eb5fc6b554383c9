"""Checkpoints in zip archives."""
