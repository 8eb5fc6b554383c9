"""The front doors of an engine: `LLM`, texts, the tokenizer, and the order in which it closes."""

from nanovllm_core.frontend.llm import (
    LLM as LLM,
)
from nanovllm_core.frontend.outputs import (
    Detokenizer as Detokenizer,
    OutputStream as OutputStream,
    RequestOutput as RequestOutput,
    Transcript as Transcript,
)
