"""Forbids ids, and sequences of ids by their last one where the others have just been written.

Everything is compared on the device: a step may be launched before the host has seen the token of
the one before. Shape suffixes: S rows that asked, V vocabulary, B banned sequences of a row, P ids
before the last one in all of them together, L ids of a row.
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


@dataclass(frozen=True, slots=True)
class Banned:
    """The sequences that a row must not complete, on the device.

    `prefix_ids` [P] int32 are the ids before the last one, of all sequences one behind another: in
    a table, one long sequence would make each short one as long. `sequences` [P] int64 says which
    sequence each is of, and `distances` [P] int64 how far it stands before the last one. `lengths`
    [B] int32 is how many a sequence has, `last_ids` [B] int64 what must not follow them.
    """

    prefix_ids: Tensor
    sequences: Tensor
    distances: Tensor
    lengths: Tensor
    last_ids: Tensor


class BannedWords(LogitsProcessor):
    """See `nanovllm_core.api.LogitsProcessor` for the contract."""

    def __init__(self, options: BannedWordsOptions, context: LogitsContext) -> None:
        super().__init__(options, context)
        self._words = words_to_ids(options.words, context)

    def prepare(self, arguments: BaseModel) -> Banned:
        """The row's tensors, copied without waiting for the device."""
        sequences = (*self._words, *cast(BannedWordsArguments, arguments).banned)
        lengths = [len(sequence) - 1 for sequence in sequences]
        on_device = self._on_device
        return Banned(
            prefix_ids=on_device([i for one in sequences for i in one[:-1]], torch.int32),
            sequences=on_device([b for b, n in enumerate(lengths) for _ in range(n)], torch.int64),
            distances=on_device([i for n in lengths for i in range(n, 0, -1)], torch.int64),
            lengths=on_device(lengths, torch.int32),
            last_ids=on_device([sequence[-1] for sequence in sequences], torch.int64),
        )

    def process(self, logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
        for logits_V, request in zip(logits_SV, requests, strict=True):
            forbid(logits_V, cast(Banned, request.state), request.token_ids, request.num_known)

    def _on_device(self, values: list[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.tensor(values, dtype=dtype)
        if self.context.device.type == "cuda":
            tensor = tensor.pin_memory()  # an unpinned copy would wait for the device
        return tensor.to(self.context.device, non_blocking=True)


def forbid(logits_V: Tensor, banned: Banned, token_ids_L: Tensor, num_known: Tensor) -> None:
    """-inf for the last id of every sequence whose prefix ends the `num_known` ids of the row."""
    places_P = num_known - banned.distances
    wrong_P = token_ids_L[places_P.clamp(min=0)] != banned.prefix_ids
    num_wrong_B = torch.zeros_like(banned.lengths).index_add_(0, banned.sequences, wrong_P.int())
    forbidden_B = (num_wrong_B == 0) & (banned.lengths <= num_known)
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
