"""The command `nanovllm`: one file per command, put together in `main`."""
