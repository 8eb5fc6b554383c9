"""Tokens of an engine, far beyond the windows, are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanovllm_core import LLM, RequestOutput, SamplingParams
from nanovllm_kit.reference_model import ReferenceCheckpoint

SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "query_pre_attn_scalar": 150,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Gemma 2": (
        transformers.Gemma2ForCausalLM,
        {"num_hidden_layers": 4, "sliding_window": 24, "attn_logit_softcapping": 5.0},
    ),
    "Gemma 3": (
        transformers.Gemma3ForCausalLM,
        {"num_hidden_layers": 6, "sliding_window": 21, "sliding_window_pattern": 3},
    ),
    "Gemma 3 with eyes": (
        transformers.Gemma3ForConditionalGeneration,
        {
            "text_config": {
                **SMALL,
                "num_hidden_layers": 3,
                "sliding_window": 40,
                "sliding_window_pattern": 3,
            },
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
    ),
}
"""Cache groups of two layers: one with a window and one without, and two with and one without.
Then three groups of one layer."""

PROMPTS = [[(7 * i + start) % 131 for i in range(start)] for start in (1, 9, 24, 40, 65, 130)]
PROMPTS += [PROMPTS[-1][:100] + PROMPTS[3], PROMPTS[-1][:70]]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(params=MODELS)
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> ReferenceCheckpoint:
    reference_class, settings = MODELS[request.param]
    if "text_config" not in settings:
        settings = {**SMALL, **settings}
    return ReferenceCheckpoint.save(tmp_path, reference_class, settings)


@contextmanager
def open_llm(folder: Path, **changes: Any) -> Iterator[LLM]:
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "attention": "sdpa",
        "max_model_len": 200,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "num_kvcache_blocks": 200,
    }
    with LLM(str(folder), **{**settings, **changes}) as llm:
        yield llm


def assert_greedy(reference: ReferenceCheckpoint, outputs: Sequence[RequestOutput]) -> None:
    """Each token is the likeliest that transformers finds behind those before it."""
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([*prompt, *output.token_ids])
        assert len(output.token_ids) == GREEDY.max_tokens
        choices = reference.logits(ids)[len(prompt) - 1 : -1].argmax(dim=-1)
        assert output.token_ids == choices.tolist(), f"prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_an_engine_writes_the_tokens_of_transformers(
    reference: ReferenceCheckpoint, steps_ahead: int
) -> None:
    """Greedy, many prompts in one batch, in chunks that begin and end anywhere in a window.

    The second time most of each prompt is in the prefix cache, or was: windows let go of it.
    """
    with open_llm(reference.folder, steps_ahead=steps_ahead) as llm:
        assert_greedy(reference, llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        before = llm.stats.prefix_hit_tokens
        assert_greedy(reference, llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert llm.stats.prefix_hit_tokens > before
        assert llm.stats.free_blocks == llm.stats.blocks


def test_preempted_requests_write_the_same_tokens(reference: ReferenceCheckpoint) -> None:
    """In a cache that is too small for the batch, whose windows let go of blocks meanwhile."""
    with open_llm(reference.folder, num_kvcache_blocks=56) as llm:
        assert_greedy(reference, llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert llm.stats.preemptions > 0


def test_transformers_generates_what_it_finds_likeliest(reference: ReferenceCheckpoint) -> None:
    """Its cache of windows agrees with its masks, so that one forward pass can judge a text."""
    reference.model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPTS[3]])
    written = reference.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=60, pad_token_id=0
    )[0]
    choices = reference.logits(written)[len(PROMPTS[3]) - 1 : -1].argmax(dim=-1)
    assert written[len(PROMPTS[3]) :].tolist() == choices.tolist()
