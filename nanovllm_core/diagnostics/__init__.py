"""Facts as data: what is installed, what a configuration would choose, and what would fail."""
