"""A small decoder: grouped-query attention with rotary positions, gated MLP, RMS norms."""
