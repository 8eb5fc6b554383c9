"""Which steps with prompts of latent attention are captured; measured on an H200.

In a captured step prompts attend to the rows of the cache, as decode does ("absorbed"). That is
three times the arithmetic of attention to keys and values. In other steps keys and values are
computed from rows, and the host launches every kernel. So short prompts are faster captured: with
a backend that shares the keys of few queries among programs, as attention `triton` does by default.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nanovllm_core.interfaces.model import ModelShape
from nanovllm_core.interfaces.plan import PrefillChunk

MOST_SCORES = 2**26
"""Of query heads and keys, in a layer of a captured step: beyond, the host launches a step sooner
than a GPU ends a captured one. On one host a prompt of 100, 500, 1,000 and 2,000 tokens took
DeepSeek-V2-Lite 11, 14, 17 and 31 ms captured, and 22, 27, 28 and 25 otherwise."""
CONTEXT_SCORES = 2**25
"""As many more where a chunk has a context: elsewhere its keys and values are computed in parts,
each by launches of its own. On one host 500 tokens behind 8,192 took 30 ms captured and 35 to 54
otherwise, 1,000 behind 2,048 26 and 62, 500 behind 16,384 45 and 38."""
TOKEN_SCORES = 30_000
"""What a token's products take, in scores: the launches of a long step hide behind them."""


def most_captured_tokens(shape: ModelShape) -> int:
    """Prompt tokens beyond which no step of a model is captured."""
    is_latent = any(one.latent for one in shape.attention_shapes)
    return MOST_SCORES // TOKEN_SCORES if is_latent else sys.maxsize


def suit_capture(chunks: Sequence[PrefillChunk], num_heads: int) -> bool:
    """Whether a step of these chunks, of latent attention, is faster captured."""
    num_tokens = sum(chunk.length for chunk in chunks)
    keys = sum(chunk.length * (chunk.start + chunk.length // 2) for chunk in chunks)
    most = MOST_SCORES + CONTEXT_SCORES * any(chunk.start for chunk in chunks)
    return num_heads * keys + TOKEN_SCORES * num_tokens <= most
