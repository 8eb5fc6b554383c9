"""The offline front door: `LLM`, the tokenizer, and the order in which an engine is closed."""
