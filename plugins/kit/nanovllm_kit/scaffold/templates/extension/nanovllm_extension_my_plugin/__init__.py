"""The room left on disk: a command, a check, and a refusal to start without."""
