"""In low precision the model is as near to float32 as transformers' own is, at any batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM as Reference

from nanovllm_kit.precision import Precision
from nanovllm_model_qwen3.model import Qwen3ForCausalLM

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
# The widths of the published models. Fewer layers and ids than they have; these do not change how
# each operation rounds.
WIDTHS: dict[str, dict[str, Any]] = {
    name: {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 4,
        "vocab_size": 32768,
        "max_position_embeddings": 1024,
    }
    for name, hidden, intermediate, heads in (
        ("0.6B", 1024, 3072, 16),
        ("1.7B", 2048, 6144, 16),
        ("8B", 4096, 12288, 32),
    )
}


def precision(width: dict[str, Any], dtype: torch.dtype, device: str, folder: Path) -> Precision:
    return Precision(Reference, width, Qwen3ForCausalLM, dtype, device, folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_small_model_rounds_no_worse_than_transformers(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """On a CPU: prompts of 64 tokens at once and in batches of 7."""
    models = precision(SMALL, dtype, "cpu", tmp_path)
    for batch in (64, 7):
        models.check(batch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("width", WIDTHS)
def test_the_published_widths_round_no_worse_than_transformers(width: str, tmp_path: Path) -> None:
    """In bfloat16 over 10,240 rows of logits, with the batch sizes that graphs are captured for."""
    models = precision(WIDTHS[width], torch.bfloat16, "cuda", tmp_path)
    for batch in (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512):
        models.check(batch, num_sequences=20 if batch >= 8 else 2, length=512)
