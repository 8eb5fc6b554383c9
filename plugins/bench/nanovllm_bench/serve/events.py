"""Server-sent events of OpenAI's completions and chat: bytes as they come -> chunks with tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec

DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        """Of a completion or of a chat, there also of the model's thoughts."""
        if (delta := self.delta) is None:
            return self.text
        return delta.content or delta.reasoning_content or delta.reasoning or ""

    @property
    def is_silent(self) -> bool:
        """Neither opens nor ends an answer, so that tokens without text may have come.

        The first bytes of a character, say, have no text of their own.
        """
        return not self.finish_reason and not (self.delta and self.delta.role)


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens as the endpoint counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class Chunk(msgspec.Struct):
    """One event of a stream; the fields that a measurement reads."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def text_length(self) -> int:
        """Characters of new text, in all choices."""
        return sum([len(choice.new_text) for choice in self.choices])


decode_chunk = msgspec.json.Decoder(Chunk).decode


class EventReader:
    """Splits what arrives at ends of lines, wherever the network cut it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of complete `data:` lines; these endpoints write one line for an event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def allot_tokens(num_tokens: int, lengths: Sequence[int]) -> list[int]:
    """How many of a stream's tokens each chunk held, by the lengths of the chunks' texts.

    Every chunk has one, as far as they go; the others are shared in proportion to the texts. So
    the counts are exact where an endpoint sends one token a chunk.
    """
    chunks = len(lengths)
    if num_tokens <= chunks:
        return [1] * num_tokens + [0] * (chunks - num_tokens)
    edges = [0, *accumulate(length or 1 for length in lengths)]
    shares = [round((num_tokens - chunks) * edge / edges[-1]) for edge in edges]
    return [1 + later - earlier for earlier, later in pairwise(shares)]
