"""The fused operations, in plain torch."""
