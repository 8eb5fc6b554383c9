"""What the routes share: the engine, the settings, the names of the model, the work they ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm_core import AsyncLLM
from nanovllm_core.errors import NanoVLLMError, shown
from nanovllm_server.errors import ApiError, of_engine
from nanovllm_server.guard.admission import Admission
from nanovllm_server.guard.isolation import cache_salt
from nanovllm_server.guard.keys import api_key
from nanovllm_server.guard.ledger import Ledger
from nanovllm_server.guard.prompts import PromptLimits, check_template_kwargs
from nanovllm_server.logprobs import TokenTexts
from nanovllm_server.protocol import ChatMessage
from nanovllm_server.settings import ServerSettings

LONG_TEXT = 20_000
"""Characters (or ids) beyond which a text is tokenised on a thread, so that no stream waits."""


class Service:
    """The engine behind the routes. `llm` is read anew for each request: it may be replaced."""

    def __init__(
        self, llm: AsyncLLM, settings: ServerSettings, ledger: Ledger | None = None
    ) -> None:
        self.llm = llm
        self.settings = settings
        self.names = settings.served_model_name or (llm.config.model,)
        self.started = int(time.time())
        self.token_texts = TokenTexts(llm.tokenizer)
        limits = settings.limits
        rows = llm.config.limits.max_num_seqs * llm.config.data_parallel_size
        self.admission = Admission(rows, limits.max_queue, ledger=ledger)
        self.prompt_limits = PromptLimits.of(llm.info.max_model_len, limits.max_prompt_characters)

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries; 404 for a model that is not served."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"model {shown(name)} is not served here; this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return self.names[0] if name is None else name

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; ApiError for one that is far too long."""
        self.prompt_limits.check_text(text, "prompt")
        encode = self.llm.tokenizer.encode
        if len(text) <= LONG_TEXT:
            return encode(text, add_special_tokens)
        return await asyncio.to_thread(encode, text, add_special_tokens)

    async def decode(self, token_ids: list[int]) -> str:
        """The text of ids, without special tokens."""
        decode = self.llm.tokenizer.decode
        if len(token_ids) <= LONG_TEXT:
            return decode(token_ids)
        return await asyncio.to_thread(decode, token_ids)

    async def text_of(self, prompt: str | list[int]) -> str:
        """A prompt as text."""
        return prompt if isinstance(prompt, str) else await self.decode(prompt)

    async def encode_prompts(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """The ids of each prompt; ApiError names the field."""
        try:
            return [await self.encode(p) if isinstance(p, str) else p for p in prompts]
        except NanoVLLMError as error:
            raise of_engine(error, "prompt") from error

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, Any] | None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a conversation, by the checkpoint's template; ApiError names the field."""
        self.prompt_limits.check_messages([message.content for message in messages])
        check_template_kwargs(variables)
        conversation = [message.for_template() for message in messages]
        template = self.llm.tokenizer.apply_chat_template
        try:
            if sum(len(message["content"]) for message in conversation) <= LONG_TEXT:
                return template(conversation, add_generation_prompt, variables)
            return await asyncio.to_thread(template, conversation, add_generation_prompt, variables)
        except NanoVLLMError as error:
            raise of_engine(error, "messages") from error

    def cache_salt(self, given: str | None) -> bytes:
        """The salt of the request that this task serves; `given` is its own field."""
        key = api_key.get() if self.settings.isolate_prefix_cache else None
        return cache_salt(None if key is None else key.name, given)
