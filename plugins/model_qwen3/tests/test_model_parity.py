"""The model equals transformers' Qwen3ForCausalLM, on random weights saved and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers import Qwen3ForCausalLM as Reference

from nanovllm_core.testing.dense_attention import DenseRuntime
from nanovllm_core.testing.layers import layer_context, load_model
from nanovllm_core.testing.numerics import assert_close_report
from nanovllm_core.testing.ranks import run_ranks
from nanovllm_model_qwen3.model import Qwen3ForCausalLM

NUM_TOKENS = 24
SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "as many KV heads as query heads": {"num_key_value_heads": 4},
    "one KV head": {"num_key_value_heads": 1},
    "yarn": {"rope_parameters": YARN},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "wide heads, another epsilon": {"head_dim": 48, "rms_norm_eps": 1e-4},
}


def save_reference(folder: Path, changes: dict[str, Any]) -> Reference:
    """A transformers model with weights large enough that nothing cancels, saved in `folder`."""
    torch.manual_seed(0)
    model = Reference(Qwen3Config(**{**SMALL, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 else 0.0
            parameter.normal_(mean, 0.2)
    model.save_pretrained(folder)
    return model


def run(model: Qwen3ForCausalLM, ids: Tensor, chunks: list[int] | int = NUM_TOKENS) -> Tensor:
    DenseRuntime(model, 64)
    positions = torch.arange(len(ids), dtype=torch.int32)
    hidden = [
        model(part, part_positions)
        for part, part_positions in zip(
            torch.split(ids, chunks), torch.split(positions, chunks), strict=True
        )
    ]
    return model.compute_logits(torch.cat(hidden))


def token_ids() -> Tensor:
    return torch.randint(0, 131, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """To 1e-4 in float32, for every setting that changes the computation."""
    reference = save_reference(tmp_path, VARIANTS[variant])
    ids = token_ids()
    expected = reference(ids[None]).logits[0]
    assert_close_report(
        run(load_model(Qwen3ForCausalLM, tmp_path, layer_context()), ids),
        expected,
        rel_norm=1e-5,
        max_abs=1e-4,
    )


@torch.inference_mode()
def test_chunks_and_single_tokens_equal_one_prefill(tmp_path: Path) -> None:
    """The cache carries what earlier calls computed, at the right positions."""
    save_reference(tmp_path, {})
    model, ids = load_model(Qwen3ForCausalLM, tmp_path, layer_context()), token_ids()
    chunks = [7, 1, 1, NUM_TOKENS - 9]
    assert_close_report(run(model, ids, chunks), run(model, ids), rel_norm=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("variant", ["tied", "bias"])
def test_the_model_split_over_ranks_equals_the_whole_one(
    ranks: int, variant: str, tmp_path: Path
) -> None:
    """With 131 ids, 2 KV heads and 4 ranks: padding, replication and biases all occur."""
    save_reference(tmp_path, VARIANTS[variant])
    ids = token_ids()
    expected = run(load_model(Qwen3ForCausalLM, tmp_path, layer_context()), ids)

    def on_rank(tp: Any) -> Tensor:
        with torch.inference_mode():
            split = layer_context(tp=tp)
            return run(load_model(Qwen3ForCausalLM, tmp_path, split), ids)

    for actual in run_ranks(ranks, on_rank):
        assert_close_report(actual, expected, rel_norm=1e-5)
