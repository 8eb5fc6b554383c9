"""The front doors of an engine: `LLM`, texts, the tokenizer, and the order in which it closes."""

from nanovllm_core.frontend.async_llm import (
    AsyncLLM as AsyncLLM,
)
from nanovllm_core.frontend.client import (
    EngineClient as EngineClient,
    Mailbox as Mailbox,
    open_engine as open_engine,
)
from nanovllm_core.frontend.door import (
    Door as Door,
)
from nanovllm_core.frontend.llm import (
    LLM as LLM,
)
from nanovllm_core.frontend.outputs import (
    Detokenizer as Detokenizer,
    OutputStream as OutputStream,
    RequestOutput as RequestOutput,
    Transcript as Transcript,
)
from nanovllm_core.frontend.tokenizer import (
    Tokenizer as Tokenizer,
)
