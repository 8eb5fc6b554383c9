"""The kernel set of nanovllm for NVIDIA GPUs, written in Triton."""
