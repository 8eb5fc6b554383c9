"""Start-up: which checkpoint and which plugins serve a configuration, and why not the others."""
