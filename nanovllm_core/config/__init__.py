"""The configuration: its settings, the sources they come from, and errors that name the setting."""
