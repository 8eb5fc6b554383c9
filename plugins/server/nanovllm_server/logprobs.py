"""Tokens as texts and bytes, and log-probabilities in the two shapes of OpenAI's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanovllm_core.api import TokenLogprobs
from nanovllm_core.frontend import Detokenizer, Tokenizer

LEAST = -9999.0
"""For the log-probability of a forbidden token: JSON has no infinity."""
REPLACEMENT = "\ufffd"


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies write for bytes: printable ones are themselves."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }


_BYTE_LETTERS = _byte_letters()


class TokenTexts:
    """The text and the bytes of single tokens, each computed once."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def __getitem__(self, token_id: int) -> tuple[str, bytes]:
        """Text and bytes. A part of a character has the text U+FFFD and its own bytes."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read(token_id)
        return known

    def offsets(self) -> TextOffsets:
        """The offsets of the tokens of one more choice."""
        tokenizer = self._tokenizer
        return TextOffsets(self, None if tokenizer is None else tokenizer.detokenizer())

    def _read(self, token_id: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            return f"token_id:{token_id}", b""
        piece = self._tokenizer.backend.id_to_token(token_id) or ""
        text = self._tokenizer.decode([token_id]) or piece  # special tokens decode to nothing
        if REPLACEMENT not in text:
            return text, text.encode()
        if piece.startswith("<0x") and piece.endswith(">"):
            return text, bytes([int(piece[3:-1], 16)])
        if all(letter in _BYTE_LETTERS for letter in piece):
            return text, bytes(_BYTE_LETTERS[letter] for letter in piece)
        return text, text.encode()


class TextOffsets:
    """Where the tokens of one choice begin in its text, as they come.

    Parts of a character begin where the first of them does. A token without text, such as the end
    of a sequence, begins where the next text does.
    """

    def __init__(self, texts: TokenTexts, detokenizer: Detokenizer | None) -> None:
        self._texts = texts
        self._detokenizer = detokenizer
        self._end = 0
        """Of the text that is complete."""
        self._holds_part = False
        """True behind a part of a character that is not complete."""

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of further tokens."""
        return [self._take_one(token_id) for token_id in token_ids]

    def _take_one(self, token_id: int) -> int:
        begin, own = self._end, self._texts[token_id][0]
        text = self._detokenizer.push([token_id]) if self._detokenizer else ""
        self._end += len(text)
        if self._holds_part and text.endswith(own):  # What came before is no character's part.
            begin = self._end - len(own)
        self._holds_part = not text and (self._holds_part or REPLACEMENT in own)
        return begin


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


def for_chat(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = texts[token_id]
        return {"token": text, "logprob": _finite(logprob), "bytes": [*raw]}

    content = [
        one(token_id, entry.token_logprob)
        | {"top_logprobs": [one(other, logprob) for other, logprob in entry.top]}
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def for_completion(
    texts: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    offsets: TextOffsets,
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offsets` has taken the tokens before.

    The likeliest tokens are by their texts, and the sampled one is among them.
    """
    names = [texts[token_id][0] for token_id in token_ids]
    tops = [
        {texts[other][0]: _finite(logprob) for other, logprob in reversed(entry.top)}
        | {name: _finite(entry.token_logprob)}
        for name, entry in zip(names, logprobs, strict=True)
    ]
    return {
        "tokens": names,
        "token_logprobs": [_finite(entry.token_logprob) for entry in logprobs],
        "top_logprobs": tops,
        "text_offset": offsets.take(token_ids),
    }
