"""Routes for nanovllm's server: an administrator's, behind a key of their own."""
