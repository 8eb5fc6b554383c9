"""Tokens of an engine, far beyond the windows, are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanovllm_core import LLM, SamplingParams
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
        {"num_hidden_layers": 7, "sliding_window": 21, "sliding_window_pattern": 3},
    ),
}
"""Two groups of two layers, and two groups with a window beside one without."""

PROMPTS = [[(7 * i + start) % 131 for i in range(start)] for start in (1, 9, 24, 40, 65, 130)]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(params=MODELS)
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> ReferenceCheckpoint:
    reference_class, settings = MODELS[request.param]
    return ReferenceCheckpoint.save(tmp_path, reference_class, {**SMALL, **settings})


@contextmanager
def open_llm(folder: Path, **changes: Any) -> Iterator[LLM]:
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "attention": "sdpa",
        "max_model_len": 200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
        "num_kvcache_blocks": 200,
    }
    with LLM(str(folder), **{**settings, **changes}) as llm:
        yield llm


def tokens_of_transformers(reference: ReferenceCheckpoint, prompt: list[int]) -> list[int]:
    reference.model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    everything = torch.ones_like(ids)  # without a mask, ids like the padding's are hidden
    written = reference.model.generate(
        ids, attention_mask=everything, do_sample=False, max_new_tokens=60, pad_token_id=0
    )
    return list(written[0, len(prompt) :].tolist())


def test_an_engine_writes_the_tokens_of_transformers(reference: ReferenceCheckpoint) -> None:
    """Greedy, prompts in one batch, in chunks that begin and end anywhere in a window."""
    with open_llm(reference.folder) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == tokens_of_transformers(reference, prompt), len(prompt)
