"""Paged attention for nanovllm, written in Triton."""
