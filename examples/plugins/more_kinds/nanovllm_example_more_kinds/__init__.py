"""An executor, a sampler, a kernel set and a command."""
