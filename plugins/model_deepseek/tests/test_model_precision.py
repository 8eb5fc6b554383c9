"""In low precision the model is as near to float32 as transformers' own is, at any batch size."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV2ForCausalLM as Reference

from nanovllm_kit.dense_attention import AbsorbedRuntime, DenseRuntime
from nanovllm_kit.precision import Precision
from nanovllm_model_deepseek.model import DeepseekV2ForCausalLM

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
V2_LITE: dict[str, Any] = SMALL | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 32768,
}
"""The widths of DeepSeek-V2-Lite in two layers: the dense one and one with experts."""
RUNTIMES = (DenseRuntime, AbsorbedRuntime)
"""As prompts are computed, and as decode steps are."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_small_model_rounds_no_worse_than_transformers(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """On a CPU: prompts of 64 tokens at once and in batches of 7, absorbed and not."""
    models = Precision(Reference, SMALL, DeepseekV2ForCausalLM, dtype, "cpu", tmp_path)
    for batch, runtime in product((64, 7), RUNTIMES):
        models.check(batch, runtime)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_published_width_rounds_no_worse_than_transformers(tmp_path: Path) -> None:
    """In bfloat16, by the kernels of few pairs, of sorted pairs and of prompts."""
    models = Precision(Reference, V2_LITE, DeepseekV2ForCausalLM, torch.bfloat16, "cuda", tmp_path)
    for batch, runtime in product((1, 2, 4, 8, 16, 64, 256, 512), RUNTIMES):
        models.check(batch, runtime, num_sequences=8 if batch >= 8 else 2, length=512)
