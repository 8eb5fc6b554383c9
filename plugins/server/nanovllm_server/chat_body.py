"""The body of `/v1/chat/completions`: a conversation, whose text parts are joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    WithJsonSchema,
    model_validator,
)

from nanovllm_core.errors import shown
from nanovllm_core.interfaces.sampling_params import (
    MAX_INTEGER,
    MAX_LOGPROBS,
)
from nanovllm_server.bodies import TEXT, Body, Sampling
from nanovllm_server.errors import refused_field
from nanovllm_server.guard.prompts import MAX_MESSAGES


def _joined(content: Any) -> Any:
    """Parts of type text, joined; parts of other types are refused by name."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise ValueError(
                f"content[{index}] has the type {shown(kind)}; this server takes text parts alone"
            )
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(
                f'content[{index}] is {shown(part)}; a text part is {{"type": "text", "text": ...}}'
            )
        texts.append(part["text"])
    return "".join(texts)


Content = Annotated[
    str,
    BeforeValidator(_joined),
    WithJsonSchema(
        {
            "anyOf": [
                TEXT,
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": TEXT},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
            ]
        }
    ),
]


class ChatMessage(Body):
    """One message of a conversation."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "name": (),
        "tool_calls": ([],),
        "function_call": (),
        "tool_call_id": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
    }

    role: Literal["system", "developer", "user", "assistant"]
    """`developer` is OpenAI's newer word for `system`, and is taken as that."""
    content: Content
    """Text, or a list of text parts, which are joined."""

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class ChatBody(Sampling):
    """The body of `/v1/chat/completions`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "safety_identifier": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: Messages
    """The conversation, which the checkpoint's chat template turns into a prompt."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as `{"enable_thinking": false}`."""
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_INTEGER)
    """OpenAI's newer name of `max_tokens`. Without either, as many as fit the model's length."""
    logprobs: bool | None = None
    """Report the log-probability of each token."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Report so many likeliest tokens too; needs `logprobs`."""

    @model_validator(mode="after")
    def _agree(self) -> ChatBody:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise refused_field(
                f"max_tokens is {old} and max_completion_tokens is {new}; they mean the same, so "
                "leave one out",
                "max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise refused_field(
                "top_logprobs is set, but logprobs is not; set logprobs too", "top_logprobs"
            )
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def reported_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
