"""Limits of text, checked before it is rendered, encoded or searched; and of whole answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm_core.errors import shown
from nanovllm_core.frontend import no_collections
from nanovllm_server.errors import ApiError, as_unicode

CHARACTERS_PER_TOKEN = 16
"""A text of more for each token of the model's length is refused unread; English has about 4."""
MAX_MESSAGES = 4096
"""Of one conversation: a template walks through them in Python."""
MAX_TEMPLATE_BYTES = 16_384
"""Of chat_template_kwargs, as JSON."""
MAX_ARGUMENT_BYTES = 2**20
"""Of logits_processors and constraints, as JSON, times the prompts: each goes to the engine so."""
MAX_ECHOED_CHARACTERS = 2**24
"""Of all prompts in an answer that echoes them, once for each choice."""
MAX_WHOLE_LOGPROBS = 2**22
"""Of an answer that is not streamed, which holds all at once: half as many took 0.8 GB."""
MAX_STOP_CHARACTERS = 2048
"""Of all stop strings of a request: each is looked for at every token."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """The longest prompt, as text and as ids. Errors are ApiError (400), here and below."""

    max_characters: int
    max_model_len: int

    @classmethod
    def of(cls, max_model_len: int, max_characters: int | None = None) -> PromptLimits:
        """The limits of a model, or the configured one."""
        return cls(max_characters or CHARACTERS_PER_TOKEN * max_model_len, max_model_len)

    def check_text(self, text: str, param: str) -> None:
        """Refuse a text that is far too long to fit, before it is encoded."""
        self._check_characters(len(text), param)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Refuse ids that leave no room for an answer, before the engine gets them."""
        if len(ids) >= self.max_model_len:
            raise ApiError(
                400,
                f"{param} has {len(ids)} tokens, and max_model_len is {self.max_model_len}, so a "
                f"prompt holds at most {self.max_model_len - 1}; shorten it, or raise "
                "limits.max_model_len of the server",
                param=param,
                code="context_length_exceeded",
            )

    def check_messages(self, messages: Sequence[str], param: str = "messages") -> None:
        """Refuse a conversation of too many messages, or of too much text in all of them."""
        if len(messages) > MAX_MESSAGES:
            raise ApiError(
                400, f"{len(messages)} messages; send at most {MAX_MESSAGES}", param=param
            )
        self._check_characters(sum(map(len, messages)), param)

    def _check_characters(self, size: int, param: str) -> None:
        if size > self.max_characters:
            raise ApiError(
                400,
                f"{param} has {size} characters, and the limit is {self.max_characters}; shorten "
                "it, or raise serve.limits.max_prompt_characters of the server",
                param=param,
                code="context_length_exceeded",
            )


def json_size(value: object) -> int:
    """The length of a part of a body as JSON.

    It has no cycles. A search for some, and for garbage in all that was parsed, would take most of
    the time.
    """
    with no_collections():
        return len(json.dumps(value, check_circular=False))


def check_template_kwargs(variables: Mapping[str, Any] | None) -> None:
    """Refuse variables that are too large for what templates use them for: flags and names."""
    size = json_size(variables) if variables else 0
    if size > MAX_TEMPLATE_BYTES:
        raise ApiError(
            400,
            f"chat_template_kwargs has {size} bytes; send at most {MAX_TEMPLATE_BYTES}",
            param="chat_template_kwargs",
        )


def check_arguments(arguments: Mapping[str, Any], num_prompts: int) -> None:
    """Refuse arguments of logits processors and constraints that would keep the engine busy."""
    for field, given in arguments.items():
        size = json_size(given) * num_prompts if given else 0
        if size > MAX_ARGUMENT_BYTES:
            raise ApiError(
                400,
                f"{field} has {size // num_prompts} bytes for each of {num_prompts} prompts; send "
                f"at most {MAX_ARGUMENT_BYTES} in all",
                param=field,
            )


def check_echo(prompts: Sequence[str], num_choices: int) -> None:
    """Refuse an answer of far more text than the request; `num_choices` of each prompt."""
    size = sum(map(len, prompts)) * num_choices
    if size > MAX_ECHOED_CHARACTERS:
        raise ApiError(
            400,
            f"the echoed prompts have {size} characters in all choices, and the limit is "
            f"{MAX_ECHOED_CHARACTERS}; lower n, or leave echo out",
            param="echo",
        )


def check_logprobs(num_alternatives: int | None, num_tokens: int) -> None:
    """Refuse a whole answer that may have more log-probabilities than memory should hold.

    `num_alternatives` come with each of `num_tokens` tokens, in all choices; None without any.
    """
    size = 0 if num_alternatives is None else num_tokens * (num_alternatives + 1)
    if size > MAX_WHOLE_LOGPROBS:
        raise ApiError(
            400,
            f"the answer may have {size} log-probabilities in all choices ({num_tokens} tokens "
            f"with {num_alternatives} alternatives each), and the limit is {MAX_WHOLE_LOGPROBS}; "
            "stream it, or ask for fewer tokens (max_tokens), choices (n) or alternatives",
            param="logprobs",
        )


def check_stops(stops: Sequence[str]) -> None:
    """Refuse stop strings that would take long to look for, or that are no Unicode text."""
    for stop in stops:
        if as_unicode(stop) != stop:
            raise ApiError(
                400,
                f"the stop string {shown(stop)} has half of a surrogate pair, which is no Unicode "
                "text; send the whole character",
                param="stop",
            )
    size = sum(map(len, stops))
    if size > MAX_STOP_CHARACTERS:
        raise ApiError(
            400,
            f"the stop strings have {size} characters in all; send at most {MAX_STOP_CHARACTERS}",
            param="stop",
        )
