"""Server-sent events of OpenAI's completions and chat: bytes as they come -> chunks with tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec

DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        return self.content or self.reasoning_content or self.reasoning or ""


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None
    finish_reason: str | None = None


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
    def text(self) -> str:
        """The new text of all choices, also of a reasoning model's thoughts."""
        return "".join(c.delta.text if c.delta else c.text for c in self.choices)

    @property
    def holds_tokens(self) -> bool:
        """Whether tokens came: text, or an empty delta that neither opens nor ends an answer.

        A token can have no text of its own: the first bytes of a character, say.
        """
        return bool(self.text) or any(
            not c.finish_reason and not (c.delta and c.delta.role) for c in self.choices
        )


decode_chunk = msgspec.json.Decoder(Chunk).decode


class EventReader:
    """Splits what arrives at ends of lines, wherever the network cut it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads of complete `data:` lines; these endpoints write one line for an event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


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
