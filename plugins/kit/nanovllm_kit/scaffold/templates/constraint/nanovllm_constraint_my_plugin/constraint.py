"""Allow the tokens that some characters write, and the end at any place but the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from nanovllm_core.api import Constraint, ConstraintContext, allow_ids
from numpy.typing import NDArray
from pydantic import BaseModel

from nanovllm_constraint_my_plugin.plugin import EngineOptions, RequestArguments


@dataclass
class State:
    """One sample: its tokens, their lengths in characters, and how many characters may follow."""

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    left: int
    is_empty: bool = True


class MyPluginConstraint(Constraint):
    """One instance serves all requests of an engine."""

    def __init__(self, options: EngineOptions, context: ConstraintContext) -> None:
        super().__init__(options, context)
        self._max_length = options.max_length
        self._texts = token_texts(context)

    def start(self, arguments: BaseModel, prompt_ids: NDArray[np.int32]) -> State:
        """Called once per sample; everything that takes long belongs here."""
        asked = cast(RequestArguments, arguments)
        wanted = set(asked.characters)
        ids = [i for i, text in enumerate(self._texts) if text and wanted.issuperset(text)]
        return State(
            ids=np.array(ids, np.int64),
            lengths=np.array([len(self._texts[i]) for i in ids], np.int64),
            left=min(asked.length, self._max_length),
        )

    def advance(self, state: State, token_id: int) -> None:
        """Called once per id that was chosen."""
        state.left -= len(self._texts[token_id])
        state.is_empty = False

    def fill(self, state: State, mask: NDArray[np.int32]) -> None:
        """Called for each id to choose; the bits of `mask` are all 0."""
        allow_ids(mask, state.ids[state.lengths <= state.left])
        if not state.is_empty:
            allow_ids(mask, self.context.eos_token_ids)


def token_texts(context: ConstraintContext) -> list[str]:
    """The text of each id; "" for special ids and those that are part of a character.

    It is the text behind another id: alone, some tokenizers drop the space that it begins with.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(context.tokenizer, local_files_only=True)
    anchor = tokenizer.encode("a", add_special_tokens=False)
    ids = [[*anchor, token_id] for token_id in range(min(len(tokenizer), context.vocab_size))]
    before, *texts = tokenizer.batch_decode(
        [anchor, *ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return [
        "" if "\N{REPLACEMENT CHARACTER}" in text else text.removeprefix(before) for text in texts
    ]
