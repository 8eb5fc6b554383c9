"""Placeholder while the configuration is written; replaced by the config work."""
