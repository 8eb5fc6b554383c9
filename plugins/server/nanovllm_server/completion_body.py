"""The body of `/v1/completions`: prompts as text or as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    BeforeValidator,
    Field,
    WithJsonSchema,
    model_validator,
)

from nanovllm_core.errors import shown
from nanovllm_core.interfaces.sampling_params import (
    MAX_LOGPROBS,
    MAX_SAMPLES,
)
from nanovllm_server.bodies import TEXT, Sampling
from nanovllm_server.errors import refused_field

MAX_PROMPTS = 1024
"""Of one request."""

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. A chat answer may fill the model's length."""


Ids = list[int]


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) <= {int}


def _as_prompts(value: Any) -> list[str | Ids]:
    """A prompt, or a list of prompts, as a list; each is text or token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not prompts:
        raise ValueError(
            f"prompt is {shown(value)}; it must be text, a list of token ids, or a list of these"
        )
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(
            f"prompt has {len(prompts)} entries; at most {MAX_PROMPTS} go into one request, so "
            "send several"
        )
    for index, one in enumerate(prompts):
        if not (isinstance(one, str) or _is_ids(one)):
            raise ValueError(
                f"prompt[{index}] is {shown(one)}; it must be text or a list of token ids"
            )
    return prompts


_IDS: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0},
}
Prompts = Annotated[
    list[Any],
    BeforeValidator(_as_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                TEXT,
                _IDS,
                {"type": "array", "minItems": 1, "items": TEXT},
                {"type": "array", "minItems": 1, "items": _IDS},
            ]
        }
    ),
]


class CompletionBody(Sampling):
    """The body of `/v1/completions`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"suffix": ("",)}

    prompt: Prompts
    """Text, token ids, or a list of either: each prompt gets `n` answers."""
    echo: bool | None = None
    """Begin each answer with its prompt."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Report the log-probability of each token, and of this many likeliest ones."""
    best_of: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """Only as many as `n`: answers are not ranked."""

    @model_validator(mode="after")
    def _supported_together(self) -> CompletionBody:
        if self.best_of not in (None, self.n or 1):
            raise refused_field(
                f"best_of is {self.best_of} and n is {self.n or 1}; answers are not ranked here, "
                "so leave best_of out",
                "best_of",
                "unsupported_parameter",
            )
        if self.echo and self.logprobs is not None:
            raise refused_field(
                "logprobs together with echo asks for those of the prompt, which are not "
                "computed; leave one of them out",
                "logprobs",
                "unsupported_parameter",
            )
        return self

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @property
    def most_tokens(self) -> int | None:
        if self.max_tokens is None:
            return max(DEFAULT_COMPLETION_TOKENS, self.min_tokens or 0)
        return self.max_tokens

    @property
    def reported_logprobs(self) -> int | None:
        return self.logprobs
