"""How the tokens of one request are chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial, wraps
from itertools import islice
from numbers import Integral, Real
from typing import Any, TypeVar

from nanovllm_core.errors import InvalidSamplingError, did_you_mean, shown

T = TypeVar("T")

MIN_SCALE, MAX_SCALE = 1e-10, 1e10
"""Of temperature and repetition penalty: logits scaled by more may be 0 or infinite in float32."""
MAX_PENALTY = 2.0
"""Of presence and frequency, upwards and downwards."""
MAX_LOGPROBS = 20
MAX_INTEGER = 2**63 - 1
"""Of every whole number, and downwards: tables and messages hold 64 bits."""
MAX_SEED = MAX_INTEGER
MAX_SAMPLES = 4096
"""Of one prompt: each is a request of its own in the engine's queue."""
MAX_STOPS = 1024
"""Strings of one request, and ids: the host looks for each at every token."""
MAX_BIAS = 100.0
"""Of one id, upwards and downwards, as in OpenAI's API."""
MAX_BIASED_IDS = 1024
"""Of one request: the tail looks at each of them in every step."""

NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""The fields that a checkpoint may have defaults for, and their neutral values.

`SamplingParams(**{**NEUTRAL, "temperature": 0})` states all of them: no checkpoint changes it.
"""


def _names_unknown_fields(cls: type[T]) -> type[T]:
    """A keyword that is no field of the dataclass raises InvalidSamplingError."""
    make = cls.__init__
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # a dataclass

    @wraps(make)
    def init(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise InvalidSamplingError(
                    f"{cls.__name__} has no field {name!r}{did_you_mean(name, known)}; it has "
                    f"{', '.join(known)}"
                )
        make(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[method-assign, assignment]  # the same signature
    return cls


@_names_unknown_fields
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling, checked when it is made.

    A field that is None is not stated. Temperature, top_k, top_p, min_p and repetition_penalty are
    then the checkpoint's defaults (`generation_config.json`), else neutral; the others take the
    default below. `max_tokens` is the exception.

    Raises `InvalidSamplingError` for a value out of its range and for an unknown keyword; the
    message names the value, the limit and the remedy.
    """

    temperature: float | None = None
    """Divides the logits: 0 always takes the likeliest token, 1 samples the model's distribution.
    Left out: the checkpoint's default, else 1."""
    top_k: int | None = None
    """Choose among the k likeliest tokens only; 0 or -1 means all tokens. Left out: the
    checkpoint's default, else 0."""
    top_p: float | None = None
    """Choose among the likeliest tokens that together hold this share of the probability. Left
    out: the checkpoint's default, else 1."""
    min_p: float | None = None
    """Exclude tokens less likely than this fraction of the likeliest token's probability. Left
    out: the checkpoint's default, else 0."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens of the prompt and the output less likely to repeat; 1 is off.
    Left out: the checkpoint's default, else 1."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that is already in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each occurrence in the output; -2 to 2."""
    max_tokens: int | None = 64
    """The most output tokens; None means up to the model's length."""
    min_tokens: int = 0
    """The request does not stop before this many output tokens."""
    stop: str | Iterable[str] | None = ()
    """The output ends before the first of these strings; the string itself is removed."""
    stop_token_ids: Iterable[int] | None = ()
    """The output ends with any of these token ids, besides the model's end-of-sequence ids."""
    ignore_eos: bool = False
    """Continue past the model's end-of-sequence ids. `stop_token_ids` still end the output."""
    seed: int | None = None
    """Fixes the random choices of this request; None derives one from the engine's seed."""
    logprobs: int | None = None
    """Report the log-probability of each token and of this many likeliest ones (0 to 20)."""
    n: int = 1
    """The number of independent outputs of the same prompt, at most 4096."""
    priority: int = 0
    """For schedulers that admit by priority: lower is earlier. Other schedulers ignore it."""
    logits_processors: Mapping[str, Mapping[str, Any]] | None = None
    """The configured logits processors that this request uses, each with its arguments."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids (at most 1024) first; -100 to 100."""
    constraints: Mapping[str, Mapping[str, Any]] | None = None
    """The configured constraints, such as grammars, that this request keeps to, each with its
    arguments."""

    def __post_init__(self) -> None:
        # Numbers of other types become Python's: numpy's wrap around.
        put = partial(object.__setattr__, self)
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                put(name, default)
        put("stop", _strings((self.stop,) if isinstance(self.stop, str) else self.stop))
        put("stop_token_ids", _token_ids(self.stop_token_ids))
        for name, (check, *limits) in _NUMBERS.items():
            if (value := getattr(self, name)) is not None:
                put(name, check(name, value, *limits))
        if self.temperature:
            _real("temperature", self.temperature, MIN_SCALE, *_NUMBERS["temperature"][2:])
        most = MAX_INTEGER if self.max_tokens is None else self.max_tokens
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0, most, "max_tokens bounds it"))
        if self.logit_bias is not None:
            put("logit_bias", _logit_bias(self.logit_bias))
        if not isinstance(self.ignore_eos, bool):
            raise InvalidSamplingError(
                f"ignore_eos is {shown(self.ignore_eos)}; it must be True or False"
            )
        for name in ("logits_processors", "constraints"):
            if getattr(self, name) is not None:
                _check_plugin_arguments(name, getattr(self, name))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids`, always as a tuple."""
        return tuple(self.stop_token_ids or ())

    def choice(self, defaults: Mapping[str, float]) -> dict[str, Any]:
        """The fields of `NEUTRAL` for this request: as stated, else of `defaults`, else neutral."""
        stated = {name: getattr(self, name) for name in NEUTRAL}
        known = {name: value for name, value in stated.items() if value is not None}
        return {**NEUTRAL, **defaults, **known}


_DEFAULTS = {
    field.name: field.default
    for field in fields(SamplingParams)
    if field.default is not None and field.name != "max_tokens"
}
"""Of the fields that are never None, whatever the caller passes."""


def _real(
    name: str, value: object, low: float, high: float, remedy: str, *, above: bool = False
) -> float:
    """The value, if `low <= value <= high`, or `low < value <= high` with `above`."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:  # a whole number beyond every float
        number = math.inf
    if low <= number <= high and not (above and number == low):
        return number
    limit = f"a finite number {'above' if above else 'of at least'} {low:g} and at most {high:g}"
    raise InvalidSamplingError(f"{name} is {shown(value)}; it must be {limit} ({remedy})")


def _integer(name: str, value: object, low: int, high: int, remedy: str) -> int:
    """The value, if it is a whole number from `low` to `high`; bools and 3.0 are none here."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if low <= number <= high:
            return number
    raise InvalidSamplingError(
        f"{name} is {shown(value)}; it must be a whole number from {low} to {high} ({remedy})"
    )


_NUMBERS: Mapping[str, tuple[Any, ...]] = {
    "temperature": (_real, 0.0, MAX_SCALE, "0 takes the likeliest token"),
    "top_k": (_integer, -1, MAX_INTEGER, "0 or -1 switches it off"),
    "top_p": (partial(_real, above=True), 0.0, 1.0, "1 switches it off"),
    "min_p": (_real, 0.0, 1.0, "0 switches it off"),
    "repetition_penalty": (_real, MIN_SCALE, MAX_SCALE, "1 switches it off"),
    "presence_penalty": (_real, -MAX_PENALTY, MAX_PENALTY, "0 switches it off"),
    "frequency_penalty": (_real, -MAX_PENALTY, MAX_PENALTY, "0 switches it off"),
    "max_tokens": (_integer, 1, MAX_INTEGER, "None means no limit of its own"),
    "seed": (_integer, 0, MAX_SEED, "None lets the engine choose"),
    "logprobs": (_integer, 0, MAX_LOGPROBS, "None switches it off"),
    "n": (_integer, 1, MAX_SAMPLES, "1 makes a single output; for more, ask again"),
    "priority": (_integer, -MAX_INTEGER, MAX_INTEGER, "0 is that of every other request"),
}
"""The check of each numeric field, its lowest and highest value, and the remedy."""


def _logit_bias(value: object) -> dict[int, float]:
    """A copy with whole ids and floats; JSON writes the ids as texts, and so may the caller."""
    if not isinstance(value, Mapping):
        raise InvalidSamplingError(
            f"logit_bias is {shown(value)}; it must map token ids to numbers, as in {{17: -100}}"
        )
    if len(value) > MAX_BIASED_IDS:
        raise InvalidSamplingError(
            f"logit_bias has {len(value)} token ids; it may have {MAX_BIASED_IDS}, so leave some "
            "out, or write a logits processor"
        )
    checked: dict[int, float] = {}
    for key, bias in value.items():
        is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token_id = _token_id("logit_bias", int(key) if is_text else key)
        if token_id in checked:
            raise InvalidSamplingError(
                f"logit_bias has token id {token_id} twice, as a number and as a text; leave one "
                "out"
            )
        checked[token_id] = _real(
            f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS, "0 changes nothing"
        )
    return checked


def _check_plugin_arguments(field: str, value: object) -> None:
    """A mapping of names to mappings; what the arguments must be, the plugin says."""
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(arguments, Mapping)
        for name, arguments in value.items()
    ):
        raise InvalidSamplingError(
            f"{field} is {shown(value)}; it must map names of {field.rpartition('_')[2]} to their "
            'arguments, as in {"name": {"key": "value"}} ({} for none)'
        )


def _token_id(field: str, value: object) -> int:
    return _integer(f"an id in {field}", value, 0, MAX_INTEGER, "leave it out")


def _token_ids(values: Iterable[int] | None) -> tuple[int, ...]:
    found = _as_tuple("stop_token_ids", values, "a list of token ids")
    return tuple(_token_id("stop_token_ids", token_id) for token_id in found)


def _strings(values: Iterable[str] | None) -> tuple[str, ...]:
    strings = _as_tuple("stop", values, "a string or a list of strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidSamplingError(
                f"stop holds {shown(string)}; it must hold strings of at least one character "
                "(leave it out to stop at no string)"
            )
    return strings


def _as_tuple(name: str, values: Iterable[T] | None, wanted: str) -> tuple[T, ...]:
    try:
        # The items of bytes are numbers, which nobody means.
        given = None if isinstance(values, bytes | bytearray) else values
        found = tuple(islice(given, MAX_STOPS + 1))  # type: ignore[arg-type]  # None is no list
    except TypeError:
        raise InvalidSamplingError(f"{name} is {shown(values)}; it must be {wanted}") from None
    if len(found) > MAX_STOPS:
        raise InvalidSamplingError(f"{name} has more than {MAX_STOPS} entries; keep the first ones")
    return found
