"""In low precision the model is as near to float32 as transformers' own is, at any batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeForCausalLM as Reference

from nanovllm_kit.precision import Precision
from nanovllm_model_qwen3_moe.model import Qwen3MoeForCausalLM

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
A30B: dict[str, Any] = SMALL | {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32768,
}
"""The widths of Qwen3-30B-A3B in one layer, behind which no row reads another one's experts."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_small_model_rounds_no_worse_than_transformers(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """On a CPU: prompts of 64 tokens at once and in batches of 7."""
    models = Precision(Reference, SMALL, Qwen3MoeForCausalLM, dtype, "cpu", tmp_path)
    for batch in (64, 7):
        models.check(batch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_published_width_rounds_no_worse_than_transformers(tmp_path: Path) -> None:
    """In bfloat16, by the kernels of few pairs, of sorted pairs and of prompts."""
    models = Precision(Reference, A30B, Qwen3MoeForCausalLM, torch.bfloat16, "cuda", tmp_path)
    for batch in (1, 2, 4, 8, 16, 64, 256, 512):
        models.check(batch, num_sequences=8 if batch >= 8 else 2, length=512)
