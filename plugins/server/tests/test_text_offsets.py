"""`text_offset` in vocabularies whose tokens end in the midst of characters."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import decoders, models, pre_tokenizers

from nanovllm_core.frontend import Tokenizer
from nanovllm_server.logprobs import TokenTexts


def make_tokenizer(folder: Path, tokens: list[str], decoder: decoders.Decoder) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoder
    return Tokenizer(backend, folder)


def ids_of(tokenizer: Tokenizer, tokens: list[str]) -> list[int]:
    vocabulary = tokenizer.backend.get_vocab()
    return [vocabulary[token] for token in tokens]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for each byte, and some in the manner of GPT-2: " " and a part of "“", and others."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    parts = ["ĠâĢ", "ľa", "Ģľa", "aâ", "ðŁ"]
    folder = tmp_path_factory.mktemp("byte_level")
    return make_tokenizer(folder, [*letters, *parts], decoders.ByteLevel())


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Words that begin with a space, and a token for each byte, in the manner of Llama 2."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "a", "▁the", "▁"]
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    folder = tmp_path_factory.mktemp("byte_fallback")
    return make_tokenizer(folder, tokens, decoders.Sequence([*decoder, decoders.Strip(" ", 1, 0)]))


SOME = [*"ĠaâĢľéÿÀ", "ĠâĢ", "ľa", "Ģľa", "aâ", "ðŁ"]


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.sampled_from(SOME), max_size=40))
def test_a_token_begins_at_the_character_that_holds_its_first_byte(
    byte_level: Tokenizer, tokens: list[str]
) -> None:
    """Whatever parts of characters come, and in whatever order."""
    texts, ids = TokenTexts(byte_level), ids_of(byte_level, tokens)
    pieces = [texts[token_id][1] for token_id in ids]
    text = b"".join(pieces).decode(errors="replace")
    wanted = []
    for place in range(len(ids)):
        before, after = b"".join(pieces[:place]), b"".join(pieces[place:])
        whole = len(before.decode(errors="replace"))
        is_joined = whole + len(after.decode(errors="replace")) > len(text)
        wanted.append(whole - is_joined)
    assert texts.offsets().take(ids) == wanted
    assert byte_level.decode(ids) == text


@pytest.mark.parametrize(
    ("tokens", "offsets"),
    [
        (["a", "<0xE6>", "<0x9D>", "<0xB1>", "a"], [0, 1, 1, 1, 2]),
        (["a", "<0xE6>", "<0x9D>", "a", "▁the", "a"], [0, 1, 1, 3, 4, 8]),
        (["▁the", "▁the", "a"], [0, 3, 7]),
        (["▁", "a", "▁", "a"], [0, 0, 1, 2]),
    ],
)
def test_offsets_are_right_behind_what_a_vocabulary_writes_otherwise(
    byte_fallback: Tokenizer, tokens: list[str], offsets: list[int]
) -> None:
    """The text of a broken character has U+FFFD for each of its bytes."""
    ids = ids_of(byte_fallback, tokens)
    assert TokenTexts(byte_fallback).offsets().take(ids) == offsets
