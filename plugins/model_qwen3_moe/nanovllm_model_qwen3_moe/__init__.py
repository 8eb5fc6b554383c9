"""The Qwen3 mixture-of-experts models for nanovllm."""
