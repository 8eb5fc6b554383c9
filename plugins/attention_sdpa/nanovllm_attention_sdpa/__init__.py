"""Paged attention on torch's `scaled_dot_product_attention`."""
