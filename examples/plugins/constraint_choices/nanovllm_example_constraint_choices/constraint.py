"""Allows the tokens that continue one of the texts, in whatever pieces the model writes it."""

from __future__ import annotations

from collections import defaultdict
from typing import cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from nanovllm_core.api import ConfigError, Constraint, ConstraintContext, allow_ids
from nanovllm_example_constraint_choices.plugin import ChoicesArguments


class Choices(Constraint):
    """See `nanovllm_core.api.Constraint` for the contract.

    A sample's state is the list of what may still follow: the rest of each text that begins with
    what was written. "" stands for a text that is complete.
    """

    def __init__(self, options: BaseModel, context: ConstraintContext) -> None:
        super().__init__(options, context)
        self._texts = token_texts(context)
        self._ids: dict[str, list[int]] = defaultdict(list)
        for token_id, text in enumerate(self._texts):
            self._ids[text].append(token_id)
        self._longest = max(map(len, self._texts))

    def start(self, arguments: BaseModel, prompt_ids: NDArray[np.int32]) -> list[str]:
        return list(cast(ChoicesArguments, arguments).texts)

    def advance(self, state: list[str], token_id: int) -> None:
        text = self._texts[token_id]
        state[:] = [rest[len(text) :] for rest in state if rest.startswith(text)]

    def fill(self, state: list[str], mask: NDArray[np.int32]) -> None:
        for rest in state:
            if not rest:
                allow_ids(mask, self.context.eos_token_ids)
            for size in range(1, min(len(rest), self._longest) + 1):
                allow_ids(mask, self._ids.get(rest[:size], ()))


def token_texts(context: ConstraintContext) -> list[str]:
    """The text of each id; "" for special ids and those that are part of a character.

    It is the text behind another id: alone, some tokenizers drop the space that it begins with.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(context.tokenizer, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"choices needs the texts of the tokens, but the tokenizer in {context.tokenizer!r} "
            f"cannot be loaded ({error}); name one under `tokenizer` of the configuration"
        ) from error
    anchor = tokenizer.encode("a", add_special_tokens=False)
    ids = [[*anchor, token_id] for token_id in range(min(len(tokenizer), context.vocab_size))]
    before, *texts = tokenizer.batch_decode(
        [anchor, *ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return [
        text.removeprefix(before) if "\N{REPLACEMENT CHARACTER}" not in text else ""
        for text in texts
    ]
