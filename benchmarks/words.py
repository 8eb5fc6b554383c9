"""A tokenizer for models that have none: each id is a word of its own."""

from __future__ import annotations

from pathlib import Path

import tokenizers


def write_words(folder: Path, vocab_size: int) -> None:
    """A `tokenizer.json` of the words w0, w1, w2, ..."""
    words = {f"w{number}": number for number in range(vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
