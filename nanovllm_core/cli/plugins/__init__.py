"""`nanovllm plugins`: what is installed, and what runs here."""
