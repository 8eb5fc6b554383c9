"""`nanovllm serve`: an OpenAI-compatible server for nanovllm's engine."""
