"""Messages to an engine, in the log."""
