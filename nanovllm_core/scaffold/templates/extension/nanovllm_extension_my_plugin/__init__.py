"""A command and a check of the environment."""
