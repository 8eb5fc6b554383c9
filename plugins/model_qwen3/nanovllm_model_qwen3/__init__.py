"""The Qwen3 dense models for nanovllm."""
