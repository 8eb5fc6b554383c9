"""Tokens as texts and bytes, and log-probabilities in the two shapes of OpenAI's."""

from __future__ import annotations

from codecs import getincrementaldecoder
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

    def has_text(self, token_id: int) -> bool:
        """False for tokens that are left out of an answer's text, such as the end of a sequence."""
        return self._tokenizer is not None and self._tokenizer.has_text(token_id)

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

    A token begins at the character that holds its first byte. A token without text, such as the end
    of a sequence, begins where the next text does.
    """

    def __init__(self, texts: TokenTexts, detokenizer: Detokenizer | None) -> None:
        self._texts = texts
        self._detokenizer = detokenizer
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._end = 0
        """Characters of the bytes that came: whole ones, and U+FFFD for those that are no UTF-8."""
        self._given = 0
        """Characters of the text that is there."""

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of further tokens."""
        return [self._take_one(token_id) for token_id in token_ids]

    def _take_one(self, token_id: int) -> int:
        if self._detokenizer is None or not self._texts.has_text(token_id):
            return self._end
        own, raw = self._texts[token_id]
        follows_part = self._holds_part
        begin = self._count(raw) if follows_part or REPLACEMENT in own else self._end
        text = self._detokenizer.push([token_id])
        self._given += len(text)
        if text and not text.endswith(REPLACEMENT):  # All text is there.
            if follows_part:  # Some vocabularies write U+FFFD for each byte of a broken character.
                begin += self._given - self._end
            self._end = self._given
        return begin

    def _count(self, raw: bytes) -> int:
        """Add a token's characters to `_end`; where the one that holds its first byte stands."""
        self._end += len(self._decoder.decode(raw[:1]))
        begin = self._end if self._is_in_character else self._end - 1
        self._end += len(self._decoder.decode(raw[1:]))
        return begin

    @property
    def _is_in_character(self) -> bool:
        return self._decoder.getstate()[0] != b""

    @property
    def _holds_part(self) -> bool:
        """True behind tokens whose text is not there yet."""
        return self._is_in_character or self._end != self._given


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
