"""The blocks that one long request holds, with the layers of the published models.

The engine is the real one, on the kit's fake worker: it counts blocks and computes nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from nanovllm_core.api import ModelShape, SamplingParams
from nanovllm_core.interfaces.cache_groups import make_groups
from nanovllm_example_model_gemma.model import Gemma2ForCausalLM, Gemma3ForCausalLM
from nanovllm_kit.engine_harness import Harness, Setting

BLOCK_SIZE, CHUNK, CONTEXT = 16, 2048, 32_768
SIZES = {"vocab_size": 256_000, "hidden_size": 64, "intermediate_size": 64}
LONG = {"num_attention_heads": 32, "max_position_embeddings": CONTEXT}
GEMMA_2 = {**SIZES, **LONG, "sliding_window": 4096}
GEMMA_3 = {**SIZES, **LONG, "sliding_window": 1024}
MODELS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "Gemma 2 2B": (Gemma2ForCausalLM, {**GEMMA_2, "num_hidden_layers": 26}, 0.563),
    "Gemma 2 27B": (Gemma2ForCausalLM, {**GEMMA_2, "num_hidden_layers": 46}, 0.563),
    "Gemma 3 1B": (
        Gemma3ForCausalLM,
        {**GEMMA_3, "num_hidden_layers": 26, "sliding_window": 512},
        0.169,
    ),
    "Gemma 3 4B": (Gemma3ForCausalLM, {**GEMMA_3, "num_hidden_layers": 34}, 0.175),
    "Gemma 3 27B": (Gemma3ForCausalLM, {**GEMMA_3, "num_hidden_layers": 62}, 0.192),
}
"""The settings that matter, and the share of a cache without windows that a request takes."""


def blocks_held(shape: ModelShape) -> int:
    """The most blocks that one request of the whole context holds after any step."""
    groups = make_groups(shape)
    num_blocks = len(groups) * CONTEXT // BLOCK_SIZE
    windows = tuple(group.sliding_window for group in groups)
    setting = Setting(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        max_num_batched_tokens=CHUNK,
        max_model_len=CONTEXT,
        cache_windows=windows,
    )
    harness = Harness(setting, debug=False)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    harness.add("long", [i % 50 for i in range(CONTEXT - 64)], params)
    return max(num_blocks - harness.engine.stats.free_blocks for _ in harness.steps())


@pytest.mark.parametrize("name", MODELS)
def test_a_long_request_takes_the_share_that_the_windows_imply(name: str) -> None:
    """Of the bytes that all layers would take without windows, empty slots of groups counted."""
    model_class, config, expected = MODELS[name]
    shape = model_class.shape(config)
    num_slots = max(len(group.layers) for group in make_groups(shape))
    seen = sum(one.sliding_window or CONTEXT for one in shape.attention_shapes)
    share = blocks_held(shape) * num_slots / (shape.num_layers * CONTEXT // BLOCK_SIZE)
    assert share == pytest.approx(expected, abs=5e-4)
    assert 1 <= share / (seen / (shape.num_layers * CONTEXT)) < 1.03, "beside what layers see"
