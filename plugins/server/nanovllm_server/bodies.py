"""The bodies of requests: OpenAI's fields, and those of the engine that OpenAI has no name for.

Nothing is ignored. A field that is not supported is refused by name, unless its value is the one
that changes nothing (`NEUTRAL` of each model); a field that nobody knows is refused too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    WithJsonSchema,
    create_model,
    model_validator,
)

from nanovllm_core import SamplingParams
from nanovllm_core.api import EngineConfig
from nanovllm_core.errors import clip, did_you_mean, shown
from nanovllm_core.interfaces.request_labels import MAX_TEXT_LENGTH
from nanovllm_core.interfaces.sampling_params import (
    MAX_BIAS,
    MAX_BIASED_IDS,
    MAX_INTEGER,
    MAX_PENALTY,
    MAX_SAMPLES,
    MAX_SCALE,
    MAX_SEED,
    MAX_STOPS,
    MIN_SCALE,
)
from nanovllm_core.registry import get_plugin_manager
from nanovllm_server.errors import refused_field
from nanovllm_server.guard.prompts import check_arguments, check_stops

MAX_FIELDS = 100
"""Of one object: pydantic reports each one that is wrong, which takes seconds for a million."""

TEXT: dict[str, Any] = {"type": "string"}
"""The schema of a text."""


class Body(BaseModel):
    """A request: strict types, no unknown fields, no unsupported field that would matter."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields of OpenAI's that are not supported, and the values (besides null) that ask nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if len(given) > MAX_FIELDS:
            raise ValueError(f"{len(given)} fields; a body has at most {MAX_FIELDS}")
        for name in given.keys() & cls.NEUTRAL.keys():
            value, neutral = given[name], cls.NEUTRAL[name]
            # Python holds 0 for False and 1 for True.
            same = (one for one in neutral if isinstance(one, bool) is isinstance(value, bool))
            if value is not None and value not in same:
                raise refused_field(
                    f"{name} is {shown(value)}, and this server does not support {name}; leave "
                    "it out",
                    name,
                    "unsupported_parameter",
                )
        asked = {name: value for name, value in given.items() if name not in cls.NEUTRAL}
        for name in (name for name in asked if name not in cls.model_fields):
            hint = did_you_mean(name, cls.model_fields)
            raise refused_field(
                f"{clip(name)}: this server has no such parameter{hint}", name, "unknown_parameter"
            )
        return asked


class StreamOptions(Body):
    """What a stream carries besides the text."""

    NEUTRAL = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    """End the stream with an event that has the number of tokens and no choices."""
    continuous_usage_stats: bool | None = None
    """Carry the number of tokens so far, of all choices, in every event; vLLM's name."""


def _few(value: Any) -> Any:
    """A mapping, refused before its entries are looked at if they are too many."""
    if isinstance(value, Mapping) and len(value) > MAX_BIASED_IDS:
        raise ValueError(
            f"logit_bias has {len(value)} token ids; it may have {MAX_BIASED_IDS}, so leave some "
            "out"
        )
    return value


Stop = Annotated[
    list[str],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}},
            ]
        }
    ),
]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Biases = Annotated[dict[str, Bias], BeforeValidator(_few)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INTEGER)]


class Sampling(Body):
    """What both endpoints share."""

    model: str | None = None
    """A served name of the model; left out, the only one."""
    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """Independent answers to the prompt; 1 where it is left out."""
    temperature: float | None = Field(default=None, ge=0, le=MAX_SCALE)
    """0 takes the likeliest token. Left out, the checkpoint's default, else 1."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Choose among the likeliest tokens that together hold this share of the probability."""
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INTEGER)
    """Choose among the k likeliest tokens; 0 or -1 means all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Exclude tokens less likely than this fraction of the likeliest one's probability."""
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """Fixes the random choices of this request."""
    presence_penalty: Penalty | None = None
    """Subtracted once from the logit of every token that is already in the answer."""
    frequency_penalty: Penalty | None = None
    """Subtracted from a token's logit for each occurrence in the answer."""
    repetition_penalty: float | None = Field(default=None, ge=MIN_SCALE, le=MAX_SCALE)
    """Above 1 makes tokens of the prompt and the answer less likely to repeat."""
    logit_bias: Biases | None = None
    """Added to the logits of these token ids."""
    stop: Stop | None = None
    """The answer ends before the first of these strings."""
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOPS)
    """The answer ends at any of these token ids."""
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_INTEGER)
    """The answer does not stop before this many tokens."""
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INTEGER)
    """The most tokens of the answer."""
    ignore_eos: bool | None = None
    """Continue past the model's end-of-sequence ids."""
    priority: int | None = Field(default=None, ge=-MAX_INTEGER, le=MAX_INTEGER)
    """For schedulers that admit by priority: lower is earlier."""
    stream: bool | None = None
    """Send the answer as it grows, as server-sent events."""
    stream_options: StreamOptions | None = None
    """Needs `stream`."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_TEXT_LENGTH)
    """Share cached prefixes only with requests of the same salt, and of the same API key."""
    user: str | None = Field(default=None, max_length=MAX_TEXT_LENGTH)
    """A label of the request, `user`, for schedulers and observers."""
    logits_processors: SkipValidation[dict[str, dict[str, Any]] | None] = None
    """The engine's logits processors that this request uses, each with its arguments."""
    constraints: SkipValidation[dict[str, dict[str, Any]] | None] = None
    """The engine's constraints that this request keeps to, each with its arguments."""

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise refused_field(
                "stream_options is set, but stream is not; set stream, or leave it out",
                "stream_options",
            )
        return self

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def most_tokens(self) -> int | None:
        """The limit of the answer; None is the model's length."""
        return self.max_tokens

    @property
    def reported_logprobs(self) -> int | None:
        """How many likeliest tokens are reported at each; None for no log-probabilities."""
        return None

    def sampling_params(self) -> SamplingParams:
        """As the engine takes them; InvalidSamplingError where it does not."""
        check_stops(self.stop or ())
        given = {"logits_processors": self.logits_processors, "constraints": self.constraints}
        check_arguments(given, self.num_prompts)
        return SamplingParams(
            n=self.n or 1,
            max_tokens=self.most_tokens,
            logprobs=self.reported_logprobs,
            logit_bias=self.logit_bias,  # type: ignore[arg-type]  # JSON's keys are texts
            **{name: getattr(self, name) for name in _SAME},
        )

    @property
    def labels(self) -> dict[str, str]:
        return {} if self.user is None else {"user": self.user}


_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "priority"),
    *("logits_processors", "constraints"),
)
"""Fields that are the engine's own; None is "not stated" there too."""


def typed_for(body: type[Sampling], config: EngineConfig) -> type[Sampling]:
    """`body` with the arguments of the engine's own logits processors and constraints.

    They are for the schema of the server's description: the engine checks the values itself.
    """
    manager = get_plugin_manager(disable=config.plugins.disable)
    fields: dict[str, Any] = {}
    for kind, choices in (
        ("logits_processor", config.logits_processors),
        ("constraint", config.constraints),
    ):
        arguments: dict[str, Any] = {}
        for choice in choices:
            spec: Any = manager.spec(kind, choice.plugin)
            arguments[choice.plugin] = spec.arguments | None, None
        named: Any = create_model(f"{body.__name__}_{kind}s", **arguments)
        documented = body.model_fields[f"{kind}s"].description
        field = Field(default=None, description=documented)
        fields[f"{kind}s"] = Annotated[named | None, SkipValidation], field
    typed: type[Sampling] = create_model(
        body.__name__, __base__=body, __doc__=body.__doc__, **fields
    )
    return typed
