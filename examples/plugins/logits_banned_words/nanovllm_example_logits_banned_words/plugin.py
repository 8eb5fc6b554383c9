"""What the processor says about itself; importing this module imports no torch.

The engine's owner lists words, in the options; a request that asks for `banned_words` is kept from
them, and from what it lists itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import LogitsProcessorSpec, hookimpl

TokenId = Annotated[int, Field(ge=0, strict=True)]
Word = Annotated[str, Field(min_length=1)]


class BannedWordsOptions(BaseModel):
    """Options of `logits_processors: [{name: banned_words}]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    words: tuple[Word, ...] = Field(
        default=(),
        description="Words kept from every request that asks for banned_words, at the start of a "
        "text and after a space.",
    )


class BannedWordsArguments(BaseModel):
    """What one request may ask: `SamplingParams(logits_processors={"banned_words": {...}})`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ids: tuple[TokenId, ...] = Field(default=(), description="Ids never to choose.")
    sequences: tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...] = Field(
        default=(), description="Sequences of ids never to complete."
    )

    @property
    def banned(self) -> tuple[tuple[int, ...], ...]:
        """All of it as sequences; an id is a sequence of one."""
        return tuple((token_id,) for token_id in self.ids) + self.sequences


def most_banned(vocab_size: int) -> int:
    """Ids that the options, and each request, may forbid at a time: together never all."""
    return (vocab_size - 1) // 2


def check(arguments: BannedWordsArguments, vocab_size: int) -> list[str]:
    """Reasons to refuse a request, before it is queued."""
    reasons = []
    num_ids = sum(map(len, arguments.banned))
    if num_ids > vocab_size:
        reasons.append(
            f"ids and sequences have {num_ids} ids, and the limit is {vocab_size}; send fewer"
        )
    outside = {i for sequence in arguments.banned for i in sequence if i >= vocab_size}
    if outside:
        reasons.append(
            f"id {min(outside)} is outside the vocabulary of {vocab_size} ids; use this model's "
            "tokenizer"
        )
    last_ids = {sequence[-1] for sequence in arguments.banned}
    if len(last_ids) > most_banned(vocab_size):
        reasons.append(
            f"{len(last_ids)} ids may be forbidden at a time, and the limit is "
            f"{most_banned(vocab_size)} of {vocab_size}; ban fewer"
        )
    return reasons


SPEC = LogitsProcessorSpec(
    name="banned_words",
    impl="nanovllm_example_logits_banned_words.processor:BannedWords",
    summary="Keeps words and token ids out of the answers of requests that ask for it.",
    options=BannedWordsOptions,
    arguments=BannedWordsArguments,
    check=check,
    contract=1,
)


@hookimpl
def nanovllm_logits_processors() -> Sequence[LogitsProcessorSpec]:
    return [SPEC]
