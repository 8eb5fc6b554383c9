"""FlashAttention over paged KV, from whichever of its Python packages is installed."""
