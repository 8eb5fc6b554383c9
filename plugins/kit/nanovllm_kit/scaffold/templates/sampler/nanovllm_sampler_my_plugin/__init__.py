"""Gumbel noise from splitmix64."""
