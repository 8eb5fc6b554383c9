"""The front doors of an engine, its tokenizer and texts, and what an engine client is made of.

The public door of the core for plugins that run engines elsewhere: `EngineClient` is their
contract, `EngineLoop` an engine that takes the messages.
"""

from nanovllm_core.engine import (
    EngineStats as EngineStats,
    OutputDelta as OutputDelta,
)
from nanovllm_core.engine.request_factory import derive_seed as derive_seed
from nanovllm_core.frontend.async_llm import AsyncLLM as AsyncLLM
from nanovllm_core.frontend.client import (
    EngineClient as EngineClient,
    Mailbox as Mailbox,
    open_engine as open_engine,
)
from nanovllm_core.frontend.door import Door as Door
from nanovllm_core.frontend.gc_freeze import (
    frozen_objects as frozen_objects,
    no_collections as no_collections,
)
from nanovllm_core.frontend.llm import LLM as LLM
from nanovllm_core.frontend.loop import (
    EngineLoop as EngineLoop,
    Started as Started,
)
from nanovllm_core.frontend.messages import (
    Abort as Abort,
    AddRequests as AddRequests,
    Answer as Answer,
    Close as Close,
    Deliver as Deliver,
    EndAt as EndAt,
    Ended as Ended,
    GetStats as GetStats,
    Message as Message,
    NewRequest as NewRequest,
    Refused as Refused,
    ResetPrefixCache as ResetPrefixCache,
    WaitIdle as WaitIdle,
)
from nanovllm_core.frontend.outputs import (
    Detokenizer as Detokenizer,
    OutputStream as OutputStream,
    RequestOutput as RequestOutput,
    Transcript as Transcript,
)
from nanovllm_core.frontend.thread import ThreadClient as ThreadClient
from nanovllm_core.frontend.tokenizer import Tokenizer as Tokenizer
