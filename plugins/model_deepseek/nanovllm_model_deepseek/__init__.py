"""The DeepSeek-V2 and DeepSeek-V3 models for nanovllm."""
