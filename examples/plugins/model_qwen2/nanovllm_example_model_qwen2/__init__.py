"""The Qwen2 dense models for nanovllm."""
