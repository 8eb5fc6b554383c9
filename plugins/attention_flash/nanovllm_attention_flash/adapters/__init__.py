"""One small file per provider, each with the same two functions."""
