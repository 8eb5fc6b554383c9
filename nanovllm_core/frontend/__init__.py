"""The offline front door: `LLM`, the tokenizer, and the order in which an engine is closed."""

from nanovllm_core.frontend.llm import (
    LLM as LLM,
)
