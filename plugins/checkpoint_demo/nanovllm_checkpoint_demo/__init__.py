"""A tiny Qwen3 checkpoint that really answers, embedded in the package."""
