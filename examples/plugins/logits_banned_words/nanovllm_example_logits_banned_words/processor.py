"""Forbids ids, and sequences of ids by their last one where the others have just been written.

Everything is compared on the device: a step may be launched before the host has seen the token of
the one before. Shape suffixes: S rows that asked, V vocabulary, B banned sequences of a row, P ids
before the last one in the longest of them, L ids of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from pydantic import BaseModel
from torch import Tensor

from nanovllm_core.api import ConfigError, LogitsContext, LogitsProcessor, LogitsRequest
from nanovllm_example_logits_banned_words.plugin import (
    BannedWordsArguments,
    BannedWordsOptions,
    most_banned,
)

ANY = -1
"""Stands in a prefix for whatever was written."""


@dataclass(frozen=True, slots=True)
class Banned:
    """The sequences that a row must not complete, on the device.

    `prefixes` [B, P] int32 are the ids before the last, right-aligned behind `ANY`; `lengths` [B]
    how many they are, `last_ids` [B] int64 what they must not be followed by.
    """

    prefixes: Tensor
    lengths: Tensor
    last_ids: Tensor


class BannedWords(LogitsProcessor):
    """See `nanovllm_core.api.LogitsProcessor` for the contract."""

    def __init__(self, options: BannedWordsOptions, context: LogitsContext) -> None:
        super().__init__(options, context)
        self._words = words_to_ids(options.words, context)

    def prepare(self, arguments: BaseModel) -> Banned:
        """The row's tables, copied without waiting for the device."""
        sequences = (*self._words, *cast(BannedWordsArguments, arguments).banned)
        longest = max((len(sequence) for sequence in sequences), default=1) - 1
        padded = [[ANY] * (longest + 1 - len(s)) + list(s[:-1]) for s in sequences]
        return Banned(
            prefixes=self._on_device(padded, torch.int32).view(len(sequences), longest),
            lengths=self._on_device([len(s) - 1 for s in sequences], torch.int32),
            last_ids=self._on_device([s[-1] for s in sequences], torch.int64),
        )

    def process(self, logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
        for logits_V, request in zip(logits_SV, requests, strict=True):
            forbid(logits_V, cast(Banned, request.state), request.token_ids, request.num_known)

    def _on_device(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        tensor = torch.tensor(values, dtype=dtype)
        if self.context.device.type == "cuda":
            tensor = tensor.pin_memory()  # an unpinned copy would wait for the device
        return tensor.to(self.context.device, non_blocking=True)


def forbid(logits_V: Tensor, banned: Banned, token_ids_L: Tensor, num_known: Tensor) -> None:
    """-inf for the last id of every sequence whose prefix ends the `num_known` ids of the row."""
    longest = banned.prefixes.shape[1]
    places_P = num_known + torch.arange(-longest, 0, device=logits_V.device)
    written_P = token_ids_L[places_P.clamp(min=0)]
    same_BP = (banned.prefixes == written_P) | (banned.prefixes == ANY)
    forbidden_B = same_BP.all(dim=1) & (banned.lengths <= num_known)
    # amin, as one id may end several sequences of which only some are forbidden now.
    values_B = torch.where(forbidden_B, -torch.inf, torch.inf).to(logits_V.dtype)
    logits_V.scatter_reduce_(0, banned.last_ids, values_B, reduce="amin")


def words_to_ids(words: Sequence[str], context: LogitsContext) -> tuple[tuple[int, ...], ...]:
    """Each word's ids at the start of a text and after a space; ConfigError where that fails."""
    if not words:
        return ()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(context.tokenizer, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"banned_words has {len(words)} words, but the tokenizer in {context.tokenizer!r} "
            f"cannot be loaded ({error}); leave `words` out and let requests give ids"
        ) from error
    forms = [text for word in words for text in (word, " " + word)]
    sequences = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in forms} - {()}
    most = most_banned(context.vocab_size)
    if len({sequence[-1] for sequence in sequences}) > most:
        raise ConfigError(
            f"banned_words has {len(words)} words, which forbid more than {most} of the "
            f"{context.vocab_size} ids of the vocabulary; ban fewer"
        )
    return tuple(sorted(sequences))
