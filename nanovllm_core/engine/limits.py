"""The capacity of the engine, and the requests that can never fit in it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.errors import (
    ConfigError,
    InvalidPromptError,
    InvalidSamplingError,
    RequestTooLongError,
)
from nanovllm_core.interfaces.cache_groups import SequenceNeed
from nanovllm_core.interfaces.plan import WorkerInfo
from nanovllm_core.interfaces.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Rows, tokens per step, tokens per request, and the blocks of the KV cache.

    `cache_windows` are the sliding windows of the cache groups, `row_padding` the multiple to which
    decoding rows are padded, as in `WorkerInfo`.
    Raises `ConfigError` for limits under which no request could run.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    cache_windows: tuple[int | None, ...] = (None,)
    row_padding: int = 1

    @classmethod
    def of(cls, config: EngineConfig, info: WorkerInfo) -> EngineLimits:
        """The limits of a started executor."""
        return cls(
            max_num_seqs=config.limits.max_num_seqs,
            max_num_batched_tokens=config.limits.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
            cache_windows=info.cache_windows,
            row_padding=info.row_padding,
        )

    def __post_init__(self) -> None:
        sizes = [one.name for one in fields(self) if one.name != "cache_windows"]
        for name in sizes:
            value, least = getattr(self, name), "1"
            if name == "max_model_len":
                least = "2, a prompt token and an output token"
            if value < int(least[0]):
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        if not self.cache_windows or any(one is not None and one < 1 for one in self.cache_windows):
            raise ConfigError(
                f"cache_windows is {self.cache_windows}; it has one window for each cache group, "
                "None or at least 1 token, and there is at least one group"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs "
                f"({self.max_num_seqs}); every running request needs a token of each step, so "
                "raise the first or lower the second"
            )

    @property
    def need(self) -> SequenceNeed:
        """The blocks that a request needs."""
        return SequenceNeed(self.cache_windows, self.block_size, self.max_num_batched_tokens)

    def check_prompt(self, token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
        """The prompt as a read-only int32 array.

        Raises `InvalidPromptError` for an empty prompt or ids outside the vocabulary,
        `RequestTooLongError` where no output token would fit behind it.
        """
        if len(token_ids) == 0:
            raise InvalidPromptError("the prompt is empty (0 tokens); give at least 1 token")
        ids = _as_array(token_ids)
        is_whole = ids.dtype.kind in "iu" or {*map(type, ids.flat)} == {int}  # beyond 64 bits
        if ids.ndim != 1 or not is_whole:
            raise InvalidPromptError(
                f"a prompt is a flat list of whole token ids; got {ids.ndim} dimensions of "
                f"{ids.dtype}"
            )
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
            raise InvalidPromptError(
                f"the prompt holds token id {int(wrong[0])}, outside the vocabulary of "
                f"{self.vocab_size} ids (0 to {self.vocab_size - 1}); use this model's tokenizer"
            )
        if len(ids) + 1 > self.max_model_len:
            raise RequestTooLongError(
                f"the prompt has {len(ids)} tokens; max_model_len is {self.max_model_len}, so a "
                f"prompt holds at most {self.max_model_len - 1}; shorten it or raise max_model_len"
            )
        checked = ids.astype(np.int32)
        checked.flags.writeable = False
        return checked

    def prompt_budget(self, num_decode: int) -> int:
        """The prompt tokens that a step may have beside so many decoding rows.

        Padded rows take their part, unless they would leave nothing.
        """
        padded = -(-num_decode // self.row_padding) * self.row_padding
        left = self.max_num_batched_tokens - min(padded, self.max_num_seqs)
        return left if left > 0 else self.max_num_batched_tokens - num_decode

    def check_length(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Prompt and output tokens at most; raises `RequestTooLongError` where that cannot fit."""
        room, most = self.max_model_len - num_prompt_tokens, params.max_tokens
        name = "min_tokens" if most is None or params.min_tokens > room else "max_tokens"
        length = num_prompt_tokens + getattr(params, name)
        if length > self.max_model_len:
            raise RequestTooLongError(
                f"{num_prompt_tokens} prompt tokens and {name}={getattr(params, name)} make "
                f"{length}; max_model_len is {self.max_model_len}, so use {name} of at most {room}"
            )
        max_length = self.max_model_len if most is None else length
        # The last token is never fed back, so it needs no place in the cache.
        needed = self.need.blocks(max_length - 1)
        if needed > self.num_blocks:
            raise RequestTooLongError(
                f"a request of up to {max_length} tokens needs {needed} blocks of "
                f"{self.block_size} tokens; the KV cache has {self.num_blocks}, so lower "
                "max_tokens or give the cache more memory"
                f"{self.need.or_smaller_chunks(max_length - 1)}"
            )
        return max_length

    def check_token_ids(self, params: SamplingParams) -> None:
        """Raises `InvalidSamplingError` for an id to stop at or to bias that no token has."""
        for name, ids in (
            ("stop_token_ids", params.stop_ids),
            ("logit_bias", params.logit_bias or ()),
        ):
            largest = max(ids, default=0)
            if largest >= self.vocab_size:
                raise InvalidSamplingError(
                    f"{name} has token id {largest}; the vocabulary has {self.vocab_size} ids (0 "
                    f"to {self.vocab_size - 1}), so leave it out"
                )


def _as_array(token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[Any]:
    """Of whatever type; `struct` takes half as long as numpy for a list, and only integers."""
    with suppress(TypeError, OverflowError, ValueError, struct.error):
        packed = struct.pack(f"{len(token_ids)}q", *token_ids) if type(token_ids) is list else b""
        return np.frombuffer(packed, np.int64) if packed else np.asarray(token_ids)
    return np.array(token_ids, dtype=object)
