"""A new kind of plugins: where the numbers of steps go."""
