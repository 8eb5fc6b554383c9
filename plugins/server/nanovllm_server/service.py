"""What the routes share: the engine, the settings, the names of the model, the work they ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from nanovllm_core import AsyncLLM
from nanovllm_core.errors import NanoVLLMError, shown
from nanovllm_server.chat_body import ChatMessage
from nanovllm_server.errors import ApiError, of_engine
from nanovllm_server.guard.admission import Admission
from nanovllm_server.guard.isolation import cache_salt
from nanovllm_server.guard.keys import api_key
from nanovllm_server.guard.ledger import Ledger
from nanovllm_server.guard.prompts import PromptLimits, check_template_kwargs
from nanovllm_server.logprobs import TokenTexts
from nanovllm_server.settings import ServerSettings

LONG_TEXT = 20_000
"""Characters (or ids) of one request beyond which a thread tokenises, so that no stream waits."""
T = TypeVar("T")


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
        self.count_lost: Callable[[int], None] = lambda _: None
        """Counts requests that end with their engine; what watches the server sets it."""

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
        return await _run(len(text), self.llm.tokenizer.encode, text, add_special_tokens)

    async def decode(self, token_ids: list[int]) -> str:
        """The text of ids, without special tokens."""
        return await _run(len(token_ids), self.llm.tokenizer.decode, token_ids)

    async def texts_of(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """Each prompt as text."""
        decode = self.llm.tokenizer.decode
        size = sum(len(one) for one in prompts if not isinstance(one, str))
        return await _run(
            size, lambda: [one if isinstance(one, str) else decode(one) for one in prompts]
        )

    async def encode_prompts(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """The ids of each prompt; ApiError names the field. Stops at the first that is too long."""
        for prompt in prompts:
            if isinstance(prompt, str):
                self.prompt_limits.check_text(prompt, "prompt")
            else:
                self.prompt_limits.check_ids(prompt, "prompt")
        size = sum(len(one) for one in prompts if isinstance(one, str))
        try:
            return await _run(size, self._encode_all, prompts)
        except NanoVLLMError as error:
            raise of_engine(error, "prompt") from error

    def _encode_all(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        encoded = []
        for prompt in prompts:
            ids = self.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            self.prompt_limits.check_ids(ids, "prompt")
            encoded.append(ids)
        return encoded

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
        size = sum(len(message["content"]) for message in conversation)
        try:
            return await _run(size, template, conversation, add_generation_prompt, variables)
        except NanoVLLMError as error:
            raise of_engine(error, "messages") from error

    def cache_salt(self, given: str | None) -> bytes:
        """The salt of the request that this task serves; `given` is its own field."""
        key = api_key.get() if self.settings.isolate_prefix_cache else None
        return cache_salt(None if key is None else key.name, given)


async def _run(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """Call `work`: on a thread where it has more than `LONG_TEXT` characters or ids to do."""
    if size <= LONG_TEXT:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)
