"""Prompts and sampling parameters as callers give them: checked, and made lists."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm_core.errors import InvalidPromptError, InvalidSamplingError, shown
from nanovllm_core.interfaces.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, str]


def as_list(name: str, expected: str, given: Any, item: type) -> Sequence[Any]:
    """`given` in a list where it is a single one, which its first `item` shows."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        raise InvalidPromptError(
            f"{name}: expected {expected} or a list of these, got {type(given).__name__} "
            f"{shown(given)}"
        )
    return [given] if given and isinstance(given[0], item) else given


def spread(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    """Parameters for each of `count` prompts."""
    if params is None:
        params = SamplingParams()
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise InvalidPromptError(
            f"{len(params)} sampling_params for {count} prompts; give one for all, or one for each"
        )
    return params


def check_token_ids(prompt: Sequence[int]) -> list[int]:
    """The ids of a prompt that is no text; InvalidPromptError where it is no flat list of them."""
    try:
        # Lists of integers, but not of ids; and of words that would be taken for ids.
        if isinstance(prompt, bytes | bytearray | Mapping):
            raise TypeError
        ids = list(prompt)
    except TypeError:
        raise InvalidPromptError(
            f"a prompt is text or a list of token ids; got {type(prompt).__name__} {shown(prompt)}"
        ) from None
    if operator.countOf(map(type, ids), int) == len(ids):  # nearly always, and in no Python loop
        return ids
    for index, token_id in enumerate(ids):
        try:
            if isinstance(token_id, bool):
                raise TypeError
            ids[index] = operator.index(token_id)  # the integers of numpy and torch too
        except TypeError:
            raise InvalidPromptError(
                f"a prompt is a flat list of whole token ids; got {type(token_id).__name__} "
                f"{shown(token_id)} at index {index}"
            ) from None
    return ids


def check_params(params: SamplingParams, has_text: bool) -> None:
    """InvalidSamplingError where these are none, or need text that there is not."""
    if not isinstance(params, SamplingParams):
        raise InvalidSamplingError(
            f"expected SamplingParams, got {type(params).__name__} {shown(params)}; make one, as "
            "in SamplingParams(temperature=0.6)"
        )
    if params.stop and not has_text:
        raise InvalidSamplingError(
            f"stop is {shown(params.stop_strings)}, but the request has no detokenizer; give one, "
            "or use stop_token_ids"
        )
