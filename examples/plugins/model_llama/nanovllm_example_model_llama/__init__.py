"""The Llama and Mistral models for nanovllm."""
