"""nanovllm: a small LLM inference engine whose parts are plugins."""

__version__ = "0.1.0"
