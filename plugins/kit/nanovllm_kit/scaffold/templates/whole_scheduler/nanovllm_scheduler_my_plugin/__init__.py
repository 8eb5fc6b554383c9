"""Prompts share each step evenly."""
